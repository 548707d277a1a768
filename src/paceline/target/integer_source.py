"""What `paceline.target.integer_kernel` has for all kinds of blocks beside `panel_source.py`, in LLVM's language: every
row is rounded, and laid where its tile finds it. Names with a dollar are filled in there."""

PREAMBLE = """
declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <16 x i32>, <16 x i32>)
declare <16 x float> @llvm.rint.v16f32(<16 x float>)
declare <16 x i32> @llvm.umax.v16i32(<16 x i32>, <16 x i32>)
declare i32 @llvm.vector.reduce.umax.v16i32(<16 x i32>)
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
"""

PRODUCT = """
define internal void @round_rows(ptr %x, ptr %records, i64 %rows, i64 %blocks, i64 %units) {
entry:
  %deal = call %Deal @deal(i64 %rows)
  %row.bytes = mul i64 %units, $ROW_UNIT
  %x.width = mul i64 %blocks, 32
  %x.bytes = mul i64 %x.width, $ITEMSIZE
  br label %tile
tile:
  %t = phi i64 [0, %entry], [%t.next, %tile.done]
  %first = phi i64 [0, %entry], [%end, %tile.done]
  %t.next = add i64 %t, 1
  %end = call i64 @end_of(%Deal %deal, i64 %t.next)
  %here = sub i64 %end, %first
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
  %t.more = icmp ult i64 %end, %rows
  br i1 %t.more, label %tile, label %done
done:
  ret void
}

define void @product(ptr %x, ptr %records, ptr %w, ptr %bias, ptr %y, i64 %rows, i64 %blocks,
                     i64 %units, i64 %outputs, i64 %stride, i64 %threads) {
  call void @round_rows(ptr %x, ptr %records, i64 %rows, i64 %blocks, i64 %units)
  call void @run(ptr %records, ptr %w, ptr %bias, ptr %y, i64 %rows, i64 %outputs,
                 i64 %stride, i64 %units, i64 %threads)
  ret void
}
"""
