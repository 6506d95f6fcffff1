// out[z] = x0[z] x1[z], batches of float32 matrices of any strides: (B, M, K) by (B, K, N).
//
// Grid: a block of 16 by 16 threads for 64 by 64 elements, 4 by 4 of a thread in registers. Tiles of 64 by 16 and 16 by 64
// elements pass through workgroup memory, 8 KiB. Per step of K a thread reads 8 words of it for 16 multiply-adds.
// Bound by arithmetic for large matrices, by memory where M or N is below 64.
// Sums of 256 terms are added up, so that rounding errors grow with K / 256 + 256.

var<workgroup> tile_a: array<f32, 1024>;
var<workgroup> tile_b: array<f32, 1024>;

@compute @workgroup_size(16, 16)
fn matmul(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) thread: vec3<u32>) {
    let z = i32(group.z);
    let first = vec2<i32>(i32(group.y), i32(group.x)) * 64;  // row, column
    let row = i32(thread.y);
    let column = i32(thread.x);
    let index = row * 16 + column;
    let a_at = scalars.x0_at + z * scalars.x0_batch;
    let b_at = scalars.x1_at + z * scalars.x1_batch;
    var sums: array<vec4<f32>, 4>;
    var totals: array<vec4<f32>, 4>;
    for (var k = 0; k < scalars.K; k += 16) {
        if (k % 256 == 0) {
            for (var part = 0; part < 4; part++) {
                totals[part] += sums[part];
                sums[part] = vec4<f32>();
            }
        }
        for (var part = 0; part < 4; part++) {
            let number = index + 256 * part;
            let a_row = first.x + number / 16;
            let a_k = k + number % 16;
            var a = 0.0;
            if (a_row < scalars.M && a_k < scalars.K) {
                a = x0[a_at + a_row * scalars.x0_row + a_k * scalars.x0_column];
            }
            tile_a[number % 16 * 64 + number / 16] = a;
            let b_k = k + number / 64;
            let b_column = first.y + number % 64;
            var b = 0.0;
            if (b_k < scalars.K && b_column < scalars.N) {
                b = x1[b_at + b_k * scalars.x1_row + b_column * scalars.x1_column];
            }
            tile_b[number] = b;
        }
        workgroupBarrier();
        for (var step = 0; step < 16; step++) {
            let b_from = step * 64 + column;
            let b = vec4<f32>(tile_b[b_from], tile_b[b_from + 16], tile_b[b_from + 32], tile_b[b_from + 48]);
            for (var part = 0; part < 4; part++) {
                sums[part] += tile_a[step * 64 + row + 16 * part] * b;
            }
        }
        workgroupBarrier();
    }
    for (var part = 0; part < 4; part++) {
        let out_row = first.x + row + 16 * part;
        let values = totals[part] + sums[part];
        for (var across = 0; across < 4; across++) {
            let out_column = first.y + column + 16 * across;
            if (out_row < scalars.M && out_column < scalars.N) {
                let at = scalars.out_at + z * scalars.out_batch + out_row * scalars.out_row;
                out[at + out_column * scalars.out_column] = values[across];
            }
        }
    }
}

// The same without workgroup memory, 4 by 4 elements of a thread: for devices that are a CPU, where a barrier is slow.
@compute @workgroup_size(8, 8)
fn matmul_blocked(@builtin(global_invocation_id) id: vec3<u32>) {
    let first = vec2<i32>(i32(id.y), i32(id.x)) * 4;
    if (first.x >= scalars.M || first.y >= scalars.N) {
        return;
    }
    let z = i32(id.z);
    let columns = min(first.y + vec4<i32>(0, 1, 2, 3), vec4<i32>(scalars.N - 1));
    let rows = min(first.x + vec4<i32>(0, 1, 2, 3), vec4<i32>(scalars.M - 1));
    var a_at = scalars.x0_at + z * scalars.x0_batch + rows * scalars.x0_row;
    var b_at = scalars.x1_at + z * scalars.x1_batch + columns * scalars.x1_column;
    var sums: array<vec4<f32>, 4>;
    var totals: array<vec4<f32>, 4>;
    for (var k = 0; k < scalars.K; k++) {
        if (k % 256 == 0) {
            for (var part = 0; part < 4; part++) {
                totals[part] += sums[part];
                sums[part] = vec4<f32>();
            }
        }
        let b = vec4<f32>(x1[b_at.x], x1[b_at.y], x1[b_at.z], x1[b_at.w]);
        sums[0] += x0[a_at.x] * b;
        sums[1] += x0[a_at.y] * b;
        sums[2] += x0[a_at.z] * b;
        sums[3] += x0[a_at.w] * b;
        a_at += vec4<i32>(scalars.x0_column);
        b_at += vec4<i32>(scalars.x1_row);
    }
    for (var part = 0; part < 4; part++) {
        let values = totals[part] + sums[part];
        for (var across = 0; across < 4; across++) {
            let out_row = first.x + part;
            let out_column = first.y + across;
            if (out_row < scalars.M && out_column < scalars.N) {
                let at = scalars.out_at + z * scalars.out_batch + out_row * scalars.out_row;
                out[at + out_column * scalars.out_column] = values[across];
            }
        }
    }
}
