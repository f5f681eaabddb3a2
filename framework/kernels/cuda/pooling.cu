// Max pooling over windows of images [N, C, H, W], and its gradient. A thread takes WIDTH channels that lie together;
// with WIDTH 1 any strides serve. An index is the place of the maximum in its window, counted row by row. The windows'
// size and stride are macros, so that loops over them unroll: WINDOW_ROWS, WINDOW_COLUMNS, STRIDE_ROWS, STRIDE_COLUMNS.
#include "common.cuh"

using Value = Real<TYPE>;
typedef Pack<TYPE, WIDTH> Elements;
typedef Pack<uint8, WIDTH> Places;

struct Images {
    int64 packs, height, width, rows, columns;  // packs of channels; height and width of x, rows and columns of y
    int64 padding[2];
    int64 x[4], y[4], indices[4];  // strides of image, pack of channels, row and column
    int64 channels_fastest;
};

// Where output or input number `index` lies, in the order of memory.
struct Place {
    int64 image, pack;
    int row, column;

    __device__ __forceinline__ Place(const Images& images, int64 index, int64 rows, int64 columns) {
        if (images.channels_fastest) pack = split(index, images.packs);
        column = static_cast<int>(split(index, columns));
        row = static_cast<int>(split(index, rows));
        if (!images.channels_fastest) pack = split(index, images.packs);
        image = index;
    }
    __device__ __forceinline__ int64 offset(const int64 (&stride)[4]) const {
        return image * stride[0] + pack * stride[1];
    }
};

KERNEL max_pool(TYPE* y, uint8* indices, const TYPE* x, int64 count, const __grid_constant__ Images images) {
    const int64 step = static_cast<int64>(gridDim.x) * THREADS;
    for (int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += step) {
        const Place place(images, i, images.rows, images.columns);
        const int top = place.row * STRIDE_ROWS - static_cast<int>(images.padding[0]);
        const int left = place.column * STRIDE_COLUMNS - static_cast<int>(images.padding[1]);
        const TYPE* image = x + place.offset(images.x);
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
                    taken[q] = *reinterpret_cast<const Elements*>(image + h * images.x[2] + w * images.x[3]);
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
            y + place.offset(images.y) + place.row * images.y[2] + place.column * images.y[3]) = best;
        *reinterpret_cast<Places*>(indices + place.offset(images.indices) + place.row * images.indices[2] +
                                   place.column * images.indices[3]) = places;
    }
}

// Each input gathers from the windows over it, always in the same order, so that nothing is added by chance.
KERNEL max_pool_backward(TYPE* grad_x, const TYPE* grad_y, const uint8* indices, int64 count,
                         const __grid_constant__ Images images) {
    constexpr int ROWS = (WINDOW_ROWS + STRIDE_ROWS - 1) / STRIDE_ROWS;  // windows that meet in one place
    constexpr int COLUMNS = (WINDOW_COLUMNS + STRIDE_COLUMNS - 1) / STRIDE_COLUMNS;
    const int64 step = static_cast<int64>(gridDim.x) * THREADS;
    for (int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += step) {
        const Place place(images, i, images.height, images.width);
        const int h = place.row + static_cast<int>(images.padding[0]);
        const int w = place.column + static_cast<int>(images.padding[1]);
        const TYPE* gradients = grad_y + place.offset(images.y);
        const uint8* image_indices = indices + place.offset(images.indices);
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
                    *reinterpret_cast<const Elements*>(gradients + row * images.y[2] + column * images.y[3]);
                const Places places = *reinterpret_cast<const Places*>(
                    image_indices + row * images.indices[2] + column * images.indices[3]);
#pragma unroll
                for (int k = 0; k < WIDTH; k++)
                    if (places.at[k] == p * WINDOW_COLUMNS + q) sum[k] += get(taken.at[k]);
            }
        }
        Elements result;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) result.at[k] = put<TYPE>(sum[k]);
        *reinterpret_cast<Elements*>(
            grad_x + place.offset(images.x) + place.row * images.x[2] + place.column * images.x[3]) = result;
    }
}
