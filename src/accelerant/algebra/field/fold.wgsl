// Follows field.wgsl: sums of a block of at most 256 threads, a power of two.

var<workgroup> tile: array<Packed, 256>;

// Add up the tile; its first element is the sum.
fn fold(thread: u32, value: Element) {
    var sum = value;
    tile[thread] = packed(sum);
    for (var width = BLOCK_X / 2u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if (thread < width) {
            sum = add(sum, unpacked(tile[thread + width]));
            tile[thread] = packed(sum);
        }
    }
}
