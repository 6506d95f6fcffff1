    let block = i32(linear_group(group, groups));
    let start = block * scalars.chunk;
    var least = scalars.n;
    let end = min(start + scalars.chunk, scalars.n);
    for (var i = start + i32(thread); i < end && least == scalars.n; i += i32(BLOCK_X)) {
        least = select(i, scalars.n, is_reduced(load_x(i)));
    }
    indices[thread] = least;
    for (var width = BLOCK_X / 2u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if (thread < width) {
            least = min(least, indices[thread + width]);
            indices[thread] = least;
        }
    }
    if (thread == 0u && start < scalars.n) {
        first[2 * block] = u32(least);
        first[2 * block + 1] = 0u;
    }
