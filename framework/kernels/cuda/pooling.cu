// Max pooling over windows of images [N, C, H, W], and its gradient. A thread takes WIDTH channels that lie together;
// with WIDTH 1 any strides serve. An index is the place of the maximum in its window, counted row by row. The windows'
// size and stride are macros, so that loops over them unroll: WINDOW_ROWS, WINDOW_COLUMNS, STRIDE_ROWS, STRIDE_COLUMNS.
#include "common.cuh"

using Value = Real<TYPE>;
typedef Pack<TYPE, WIDTH> Elements;
typedef Pack<uint8, WIDTH> Places;

struct Images {
    int64 lines;              // rows of all images, and of all channels where those lie behind the columns
    int64 image_stride[3];    // of x, y and indices
    int64 channel_stride[3];  // of a pack of channels
    int height, width, rows, columns;  // height and width of x, rows and columns of y
    int top, left;                     // padding
    int inner_packs, outer_packs;      // packs of channels that lie within a column, or behind all columns
    int row_stride[3], column_stride[3];
};

enum Which { X, Y, INDICES };

// What a thread works on: a column of a line, and the offsets of that line's image and pack of channels.
struct Place {
    int row, column;
    int64 image, pack;

    __device__ __forceinline__ Place(const Images& images, int64 line, int item, int rows) {
        row = static_cast<int>(split(line, rows));
        pack = split(line, images.outer_packs) + item % images.inner_packs;
        column = item / images.inner_packs;
        image = line;
    }
    __device__ __forceinline__ int64 offset(const Images& images, Which which) const {
        return image * images.image_stride[which] + pack * images.channel_stride[which];
    }
};

__device__ __forceinline__ int within(const Images& images, Which which, int row, int column) {
    return row * images.row_stride[which] + column * images.column_stride[which];
}

KERNEL max_pool(TYPE* y, uint8* indices, const TYPE* x, const __grid_constant__ Images images) {
    grid_dependency_synchronize();
    const int item = blockIdx.x * THREADS + threadIdx.x;
    if (item >= images.columns * images.inner_packs) return;
    for (int64 line = blockIdx.y; line < images.lines; line += gridDim.y) {
        const Place place(images, line, item, images.rows);
        const int top = place.row * STRIDE_ROWS - images.top;
        const int left = place.column * STRIDE_COLUMNS - images.left;
        const TYPE* image = x + place.offset(images, X);
        Elements best = {};
        Places places = {};
        bool found = false;
#pragma unroll
        for (int p = 0; p < WINDOW_ROWS; p++) {
            Elements taken[WINDOW_COLUMNS];
#pragma unroll
            for (int q = 0; q < WINDOW_COLUMNS; q++) {
                const int h = top + p, w = left + q;
                if (h >= 0 && h < images.height && w >= 0 && w < images.width)
                    taken[q] = *reinterpret_cast<const Elements*>(image + within(images, X, h, w));
            }
#pragma unroll
            for (int q = 0; q < WINDOW_COLUMNS; q++) {
                const int h = top + p, w = left + q;
                if (h >= 0 && h < images.height && w >= 0 && w < images.width) {
#pragma unroll
                    for (int k = 0; k < WIDTH; k++) {
                        const Value value = get(taken[q].at[k]), held = get(best.at[k]);
                        if (!found || value > held || (is_nan(value) && !is_nan(held))) {
                            best.at[k] = taken[q].at[k];
                            places.at[k] = static_cast<uint8>(p * WINDOW_COLUMNS + q);
                        }
                    }
                    found = true;
                }
            }
        }
        *reinterpret_cast<Elements*>(
            y + place.offset(images, Y) + within(images, Y, place.row, place.column)) = best;
        *reinterpret_cast<Places*>(indices + place.offset(images, INDICES) +
                                   within(images, INDICES, place.row, place.column)) = places;
    }
}

// Each input gathers from the windows over it, always in the same order, so that nothing is added by chance.
KERNEL max_pool_backward(TYPE* grad_x, const TYPE* grad_y, const uint8* indices,
                         const __grid_constant__ Images images) {
    grid_dependency_synchronize();
    constexpr int ROWS = (WINDOW_ROWS + STRIDE_ROWS - 1) / STRIDE_ROWS;  // windows that meet in one place
    constexpr int COLUMNS = (WINDOW_COLUMNS + STRIDE_COLUMNS - 1) / STRIDE_COLUMNS;
    const int item = blockIdx.x * THREADS + threadIdx.x;
    if (item >= images.width * images.inner_packs) return;
    for (int64 line = blockIdx.y; line < images.lines; line += gridDim.y) {
        const Place place(images, line, item, images.height);
        const int h = place.row + images.top;
        const int w = place.column + images.left;
        const TYPE* gradients = grad_y + place.offset(images, Y);
        const uint8* image_indices = indices + place.offset(images, INDICES);
        Value sum[WIDTH] = {};
#pragma unroll
        for (int a = ROWS - 1; a >= 0; a--) {
            const int row = h / STRIDE_ROWS - a, p = h - row * STRIDE_ROWS;
#pragma unroll
            for (int b = COLUMNS - 1; b >= 0; b--) {
                const int column = w / STRIDE_COLUMNS - b, q = w - column * STRIDE_COLUMNS;
                if (row < 0 || row >= images.rows || column < 0 || column >= images.columns || p >= WINDOW_ROWS ||
                    q >= WINDOW_COLUMNS)
                    continue;
                const Elements taken =
                    *reinterpret_cast<const Elements*>(gradients + within(images, Y, row, column));
                const Places places = *reinterpret_cast<const Places*>(
                    image_indices + within(images, INDICES, row, column));
#pragma unroll
                for (int k = 0; k < WIDTH; k++)
                    if (places.at[k] == p * WINDOW_COLUMNS + q) sum[k] += get(taken.at[k]);
            }
        }
        Elements result;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) result.at[k] = put<TYPE>(sum[k]);
        *reinterpret_cast<Elements*>(
            grad_x + place.offset(images, X) + within(images, X, place.row, place.column)) = result;
    }
}

#if STRIDE_ROWS * STRIDE_COLUMNS <= 4
// The same where strides are small: a thread takes the STRIDE_ROWS by STRIDE_COLUMNS inputs that lie under the same
// windows, so that each window is read once for all of them, and which place of it an input has is known beforehand.
KERNEL max_pool_backward_tiles(TYPE* grad_x, const TYPE* grad_y, const uint8* indices,
                               const __grid_constant__ Images images) {
    grid_dependency_synchronize();
    constexpr int ROWS = (WINDOW_ROWS - 1) / STRIDE_ROWS + 1, COLUMNS = (WINDOW_COLUMNS - 1) / STRIDE_COLUMNS + 1;
    const int item = blockIdx.x * THREADS + threadIdx.x;
    const int first_row = images.top / STRIDE_ROWS, first_column = images.left / STRIDE_COLUMNS;
    const int tile_rows = (images.top + images.height - 1) / STRIDE_ROWS - first_row + 1;
    const int tile_columns = (images.left + images.width - 1) / STRIDE_COLUMNS - first_column + 1;
    if (item >= tile_columns * images.inner_packs) return;
    for (int64 line = blockIdx.y; line < images.lines; line += gridDim.y) {
        const Place place(images, line, item, tile_rows);
        const int last_row = place.row + first_row, last_column = place.column + first_column;
        const TYPE* gradients = grad_y + place.offset(images, Y);
        const uint8* image_indices = indices + place.offset(images, INDICES);
        Value sum[STRIDE_ROWS][STRIDE_COLUMNS][WIDTH] = {};
#pragma unroll
        for (int a = ROWS - 1; a >= 0; a--) {
#pragma unroll
            for (int b = COLUMNS - 1; b >= 0; b--) {
                const int row = last_row - a, column = last_column - b;
                if (row < 0 || row >= images.rows || column < 0 || column >= images.columns) continue;
                const Elements taken =
                    *reinterpret_cast<const Elements*>(gradients + within(images, Y, row, column));
                const Places places =
                    *reinterpret_cast<const Places*>(image_indices + within(images, INDICES, row, column));
#pragma unroll
                for (int t = 0; t < STRIDE_ROWS; t++) {
#pragma unroll
                    for (int u = 0; u < STRIDE_COLUMNS; u++) {
                        const int p = a * STRIDE_ROWS + t, q = b * STRIDE_COLUMNS + u;
                        if (p >= WINDOW_ROWS || q >= WINDOW_COLUMNS) continue;
#pragma unroll
                        for (int k = 0; k < WIDTH; k++)
                            if (places.at[k] == p * WINDOW_COLUMNS + q) sum[t][u][k] += get(taken.at[k]);
                    }
                }
            }
        }
#pragma unroll
        for (int t = 0; t < STRIDE_ROWS; t++) {
#pragma unroll
            for (int u = 0; u < STRIDE_COLUMNS; u++) {
                const int h = last_row * STRIDE_ROWS + t - images.top;
                const int w = last_column * STRIDE_COLUMNS + u - images.left;
                if (h < 0 || h >= images.height || w < 0 || w >= images.width) continue;
                Elements result;
#pragma unroll
                for (int k = 0; k < WIDTH; k++) result.at[k] = put<TYPE>(sum[t][u][k]);
                *reinterpret_cast<Elements*>(grad_x + place.offset(images, X) + within(images, X, h, w)) = result;
            }
        }
    }
}
#endif
