"""What `paceline.target.integer_kernel` has in common for all kinds of blocks, in LLVM's language: dealing rows out to
tiles, and panels to threads. Names with a dollar are filled in there."""

PREAMBLE = """
declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <16 x i32>, <16 x i32>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare <16 x float> @llvm.rint.v16f32(<16 x float>)
declare <16 x i32> @llvm.umax.v16i32(<16 x i32>, <16 x i32>)
declare i32 @llvm.vector.reduce.umax.v16i32(<16 x i32>)
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
declare void @llvm.masked.store.v16i16.p0(<16 x i16>, ptr, i32, <16 x i1>)
declare void @llvm.masked.store.v16f32.p0(<16 x float>, ptr, i32, <16 x i1>)
declare i64 @llvm.umax.i64(i64, i64)
declare i64 @llvm.umin.i64(i64, i64)
declare void @GOMP_parallel(ptr, ptr, i32, i32)

; records, panels, bias, y, rows, outputs, stride, units, chunk, next panel
%Work = type { ptr, ptr, ptr, ptr, i64, i64, i64, i64, i64, i64 }
"""

# Each thread takes a few panels at a time, so that one that is held up does not hold up the others.
PRODUCT = """
define internal void @work(ptr %work) {
entry:
  %all = load %Work, ptr %work
  %x = extractvalue %Work %all, 0
  %w = extractvalue %Work %all, 1
  %bias = extractvalue %Work %all, 2
  %y = extractvalue %Work %all, 3
  %rows = extractvalue %Work %all, 4
  %outputs = extractvalue %Work %all, 5
  %stride = extractvalue %Work %all, 6
  %units = extractvalue %Work %all, 7
  %chunk = extractvalue %Work %all, 8
  %next = getelementptr %Work, ptr %work, i64 0, i32 9
  %ceil = add i64 %outputs, $OVER
  %panels = udiv i64 %ceil, $COLUMNS
  %up = add i64 %rows, $UP
  %tiles = udiv i64 %up, $ROWS
  %few = udiv i64 %rows, %tiles
  %extra = urem i64 %rows, %tiles
  %last = sub i64 %tiles, 1
  %alone = icmp eq i64 %tiles, 1
  %panel.bytes = mul i64 %units, $UNIT
  %row.records = mul i64 %units, $BLOCKS
  %row.bytes = mul i64 %row.records, $RECORD
  %away = select i1 %alone, i64 $AHEAD, i64 %panel.bytes
  br label %take
take:
  %begin = atomicrmw add ptr %next, i64 %chunk monotonic
  %some = icmp ult i64 %begin, %panels
  br i1 %some, label %taken, label %done
taken:
  %wanted = add i64 %begin, %chunk
  %end = call i64 @llvm.umin.i64(i64 %wanted, i64 %panels)
  br label %panel
panel:
  %p = phi i64 [%begin, %taken], [%p.next, %panel.done]
  %w.offset = mul i64 %p, %panel.bytes
  %w.panel = getelementptr i8, ptr %w, i64 %w.offset
  %w.away = getelementptr i8, ptr %w.panel, i64 %away
  %column = mul i64 %p, $COLUMNS
  %bias.panel = getelementptr float, ptr %bias, i64 %column
  %y.offset = mul i64 %column, $ITEMSIZE
  %y.panel = getelementptr i8, ptr %y, i64 %y.offset
  %columns = sub i64 %outputs, %column
  br label %tile
tile:
  %t = phi i64 [0, %panel], [%t.next, %tile]
  %row = phi i64 [0, %panel], [%row.next, %tile]
  %larger = icmp ult i64 %t, %extra
  %one = zext i1 %larger to i64
  %here = add i64 %few, %one
  %is.last = icmp eq i64 %t, %last
  %ahead = select i1 %is.last, ptr %w.away, ptr %w.panel
  %x.bytes = mul i64 %row, %row.bytes
  %x.tile = getelementptr i8, ptr %x, i64 %x.bytes
  %y.bytes = mul i64 %row, %stride
  %y.tile = getelementptr i8, ptr %y.panel, i64 %y.bytes
  %which = sub i64 %here, 1
  %tile.at = getelementptr [$ROWS x ptr], ptr @tiles, i64 0, i64 %which
  %kernel = load ptr, ptr %tile.at
  call void %kernel(ptr %x.tile, ptr %w.panel, ptr %ahead, ptr %bias.panel, ptr %y.tile,
                    i64 %stride, i64 %columns, i64 %units)
  %row.next = add i64 %row, %here
  %t.next = add i64 %t, 1
  %t.more = icmp ult i64 %t.next, %tiles
  br i1 %t.more, label %tile, label %panel.done
panel.done:
  %p.next = add i64 %p, 1
  %p.more = icmp ult i64 %p.next, %end
  br i1 %p.more, label %panel, label %take
done:
  ret void
}

define internal void @round_rows(ptr %x, ptr %records, i64 %rows, i64 %blocks, i64 %units) {
entry:
  %up = add i64 %rows, $UP
  %tiles = udiv i64 %up, $ROWS
  %few = udiv i64 %rows, %tiles
  %extra = urem i64 %rows, %tiles
  %row.records = mul i64 %units, $BLOCKS
  %row.bytes = mul i64 %row.records, $RECORD
  %x.width = mul i64 %blocks, 32
  %x.bytes = mul i64 %x.width, $ITEMSIZE
  br label %tile
tile:
  %t = phi i64 [0, %entry], [%t.next, %tile.done]
  %first = phi i64 [0, %entry], [%end, %tile.done]
  %larger = icmp ult i64 %t, %extra
  %one = zext i1 %larger to i64
  %here = add i64 %few, %one
  %end = add i64 %first, %here
  %stride = mul i64 %here, $RECORD
  %tile.at = mul i64 %first, %row.bytes
  %tile.records = getelementptr i8, ptr %records, i64 %tile.at
  br label %row
row:
  %r = phi i64 [%first, %tile], [%r.next, %row]
  %inside = sub i64 %r, %first
  %record.at = mul i64 %inside, $RECORD
  %record = getelementptr i8, ptr %tile.records, i64 %record.at
  %x.at = mul i64 %r, %x.bytes
  %x.row = getelementptr i8, ptr %x, i64 %x.at
  call void @round(ptr %x.row, ptr %record, i64 %stride, i64 %blocks)
  %r.next = add i64 %r, 1
  %r.more = icmp ult i64 %r.next, %end
  br i1 %r.more, label %row, label %tile.done
tile.done:
  %t.next = add i64 %t, 1
  %t.more = icmp ult i64 %t.next, %tiles
  br i1 %t.more, label %tile, label %done
done:
  ret void
}

define void @product(ptr %x, ptr %records, ptr %w, ptr %bias, ptr %y, i64 %rows, i64 %blocks,
                     i64 %units, i64 %outputs, i64 %stride, i64 %threads) {
  %work = alloca %Work, align 64
  call void @round_rows(ptr %x, ptr %records, i64 %rows, i64 %blocks, i64 %units)
  %ceil = add i64 %outputs, $OVER
  %panels = udiv i64 %ceil, $COLUMNS
  %parts = mul i64 %threads, 4
  %part = udiv i64 %panels, %parts
  %chunk = call i64 @llvm.umax.i64(i64 %part, i64 1)
  %w0 = insertvalue %Work poison, ptr %records, 0
  %w1 = insertvalue %Work %w0, ptr %w, 1
  %w2 = insertvalue %Work %w1, ptr %bias, 2
  %w3 = insertvalue %Work %w2, ptr %y, 3
  %w4 = insertvalue %Work %w3, i64 %rows, 4
  %w5 = insertvalue %Work %w4, i64 %outputs, 5
  %w6 = insertvalue %Work %w5, i64 %stride, 6
  %w7 = insertvalue %Work %w6, i64 %units, 7
  %w8 = insertvalue %Work %w7, i64 %chunk, 8
  %w9 = insertvalue %Work %w8, i64 0, 9
  store %Work %w9, ptr %work
  %count = trunc i64 %threads to i32
  $RUN
  ret void
}
"""
