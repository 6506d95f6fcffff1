    let block = i32(linear_group(group, groups));
    let first = block * scalars.chunk;
    var sum = zero();
    for (var i = first + i32(thread); i < min(first + scalars.chunk, scalars.n); i += i32(BLOCK_X)) {
        sum = add(sum, TERM);
    }
    fold(thread, sum);
    if (thread == 0u && first < scalars.n) {
        store_partial(block, RESULT);
    }
