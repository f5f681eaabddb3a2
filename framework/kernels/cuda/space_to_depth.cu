// Folds 2×2 pixels of an image into the channels of one, and weights alike, so that a convolution with stride 2 over
// few channels becomes one with stride 1 over four times as many. Cells beyond the image, and channels added, are 0.
#include "common.cuh"

struct Fold {
    int64 images, channels, height, width;  // of the unfolded array
    int64 stride[4];                        // of the unfolded array: image, channel, row, column
    int64 rows, columns, depth;             // of the folded array, which lies [images, rows, columns, depth]
    int64 top, left;                        // how far the unfolded array lies inside the first cell
};

constexpr int WIDTH = 16 / sizeof(TYPE);

// One thread for each 16 bytes of the folded array, whose depth is a multiple of that.
KERNEL fold(TYPE* out, const TYPE* in, const __grid_constant__ Fold shape) {
    grid_dependency_synchronize();
    const int64 packs = shape.images * shape.rows * shape.columns * (shape.depth / WIDTH);
    const int64 step = static_cast<int64>(gridDim.x) * THREADS;
    const int channels = static_cast<int>(shape.channels);
    for (int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x; i < packs; i += step) {
        int64 rest = i;
        const int first = static_cast<int>(split(rest, shape.depth / WIDTH)) * WIDTH;
        const int64 w = 2 * split(rest, shape.columns) - shape.left;
        const int64 h = 2 * split(rest, shape.rows) - shape.top;
        const TYPE* image = in + rest * shape.stride[0] + h * shape.stride[2] + w * shape.stride[3];
        int pixel = first / channels, c = first % channels;
        Pack<TYPE, WIDTH> cell;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            const int down = pixel / 2, right = pixel % 2;
            const bool inside = pixel < 4 && h + down >= 0 && h + down < shape.height && w + right >= 0 &&
                                w + right < shape.width;
            cell.at[k] = inside ? image[c * shape.stride[1] + down * shape.stride[2] + right * shape.stride[3]]
                                : put<TYPE>(Real<TYPE>(0));
            if (++c == channels) {
                c = 0;
                pixel++;
            }
        }
        store_pack<TYPE, WIDTH>(out, i, cell);
    }
}

// The inverse, onto an array that lies wholly within the cells.
KERNEL unfold(TYPE* out, const TYPE* in, const __grid_constant__ Fold shape) {
    grid_dependency_synchronize();
    const int64 count = shape.images * shape.channels * shape.height * shape.width;
    const int64 step = static_cast<int64>(gridDim.x) * THREADS;
    for (int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += step) {
        int64 rest = i;
        const int64 w = split(rest, shape.width);
        const int64 h = split(rest, shape.height);
        const int64 c = split(rest, shape.channels);
        const int64 y = h + shape.top, x = w + shape.left;
        const int64 cell = (rest * shape.rows + y / 2) * shape.columns + x / 2;
        out[rest * shape.stride[0] + c * shape.stride[1] + h * shape.stride[2] + w * shape.stride[3]] =
            in[cell * shape.depth + (y % 2 * 2 + x % 2) * shape.channels + c];
    }
}
