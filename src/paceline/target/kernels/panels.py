"""What the kernels of `products.py` and `integer_kernel.py` have in common, in LLVM's language: dealing rows out to
tiles, and panels to threads. Names with a dollar are filled in there.

A kernel adds its tiles, @tile1 to @tileROWS in a table @tiles. Each multiplies its number of rows, which lie side by
side, by a panel; `units` says how long both are, in units of $UNIT bytes of a panel and $ROW_UNIT bytes of a row. And
it adds what is called from outside, which calls @run.
"""

PREAMBLE = """
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare void @llvm.masked.store.v16i16.p0(<16 x i16>, ptr, i32, <16 x i1>)
declare void @llvm.masked.store.v16f32.p0(<16 x float>, ptr, i32, <16 x i1>)
declare i64 @llvm.umax.i64(i64, i64)
declare i64 @llvm.umin.i64(i64, i64)
declare void @GOMP_parallel(ptr, ptr, i32, i32)

; rows, panels, bias, y, number of rows, outputs, stride of y, units, panels taken at once, next panel
%Work = type { ptr, ptr, ptr, ptr, i64, i64, i64, i64, i64, i64 }
; rows of a tile, and how many tiles have one more
%Deal = type { i64, i64 }
"""

ON_ALL_THREADS = "call void @GOMP_parallel(ptr @work, ptr %work, i32 %count, i32 0)"
ON_THIS_THREAD = "call void @work(ptr %work)"

# Each thread takes a few panels at a time, so that one that is held up does not hold up the others. Rows are dealt out
# evenly to as few tiles as will do.
PRODUCT = """
define internal %Deal @deal(i64 %rows) {
  %up = add i64 %rows, $UP
  %tiles = udiv i64 %up, $ROWS
  %few = udiv i64 %rows, %tiles
  %extra = urem i64 %rows, %tiles
  %some = insertvalue %Deal poison, i64 %few, 0
  %deal = insertvalue %Deal %some, i64 %extra, 1
  ret %Deal %deal
}

; the first row after the first %tiles tiles
define internal i64 @end_of(%Deal %deal, i64 %tiles) {
  %few = extractvalue %Deal %deal, 0
  %extra = extractvalue %Deal %deal, 1
  %least = mul i64 %few, %tiles
  %more = call i64 @llvm.umin.i64(i64 %extra, i64 %tiles)
  %end = add i64 %least, %more
  ret i64 %end
}

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
  %deal = call %Deal @deal(i64 %rows)
  %first.end = call i64 @end_of(%Deal %deal, i64 1)
  %alone = icmp eq i64 %first.end, %rows
  %panel.bytes = mul i64 %units, $UNIT
  %row.bytes = mul i64 %units, $ROW_UNIT
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
  %t.next = add i64 %t, 1
  %row.next = call i64 @end_of(%Deal %deal, i64 %t.next)
  %t.more = icmp ult i64 %row.next, %rows
  ; the last tile of a panel prefetches what comes after the panel
  %ahead = select i1 %t.more, ptr %w.panel, ptr %w.away
  %x.bytes = mul i64 %row, %row.bytes
  %x.tile = getelementptr i8, ptr %x, i64 %x.bytes
  %y.bytes = mul i64 %row, %stride
  %y.tile = getelementptr i8, ptr %y.panel, i64 %y.bytes
  %here = sub i64 %row.next, %row
  %which = sub i64 %here, 1
  %tile.at = getelementptr [$ROWS x ptr], ptr @tiles, i64 0, i64 %which
  %kernel = load ptr, ptr %tile.at
  call void %kernel(ptr %x.tile, ptr %w.panel, ptr %ahead, ptr %bias.panel, ptr %y.tile,
                    i64 %stride, i64 %columns, i64 %units)
  br i1 %t.more, label %tile, label %panel.done
panel.done:
  %p.next = add i64 %p, 1
  %p.more = icmp ult i64 %p.next, %end
  br i1 %p.more, label %panel, label %take
done:
  ret void
}

define internal void @run(ptr %x, ptr %w, ptr %bias, ptr %y, i64 %rows, i64 %outputs,
                          i64 %stride, i64 %units, i64 %threads) {
  %work = alloca %Work, align 64
  %ceil = add i64 %outputs, $OVER
  %panels = udiv i64 %ceil, $COLUMNS
  %parts = mul i64 %threads, 4
  %part = udiv i64 %panels, %parts
  %chunk = call i64 @llvm.umax.i64(i64 %part, i64 1)
  %w0 = insertvalue %Work poison, ptr %x, 0
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
