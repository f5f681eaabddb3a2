// Max pooling over windows of images [N, C, H, W], and its gradient. A thread takes WIDTH channels that lie together;
// with WIDTH 1 any strides serve. An index is the place of the maximum in its window, counted row by row.
#include "common.cuh"

using Value = Real<TYPE>;
typedef Pack<TYPE, WIDTH> Elements;
typedef Pack<uint8, WIDTH> Places;

struct Windows {
    int64 images, packs, height, width, rows, columns;  // of x, in packs of channels; rows and columns are of y
    int64 kernel[2], stride[2], padding[2];
    int64 x[4], y[4], indices[4];  // strides of image, pack of channels, row and column
    int64 channels_fastest;
};

// Where output or input number `index` lies, in the order of memory.
struct Place {
    int64 image, pack, row, column;

    __device__ __forceinline__ Place(const Windows& windows, int64 index, int64 rows, int64 columns) {
        if (windows.channels_fastest) pack = split(index, windows.packs);
        column = split(index, columns);
        row = split(index, rows);
        if (!windows.channels_fastest) pack = split(index, windows.packs);
        image = index;
    }
    __device__ __forceinline__ int64 offset(const int64 (&stride)[4], int64 row, int64 column) const {
        return image * stride[0] + pack * stride[1] + row * stride[2] + column * stride[3];
    }
};

KERNEL max_pool(TYPE* y, uint8* indices, const TYPE* x, int64 count, const __grid_constant__ Windows windows) {
    const int64 step = static_cast<int64>(gridDim.x) * THREADS;
    for (int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += step) {
        const Place place(windows, i, windows.rows, windows.columns);
        Elements best;
        Places places = {};
        bool found = false;
        const int top = static_cast<int>(place.row * windows.stride[0] - windows.padding[0]);
        const int left = static_cast<int>(place.column * windows.stride[1] - windows.padding[1]);
        for (int p = 0; p < windows.kernel[0]; p++) {
            for (int q = 0; q < windows.kernel[1]; q++) {
                const int h = top + p, w = left + q;
                if (h < 0 || h >= windows.height || w < 0 || w >= windows.width) continue;
                const Elements taken = *reinterpret_cast<const Elements*>(x + place.offset(windows.x, h, w));
#pragma unroll
                for (int k = 0; k < WIDTH; k++) {
                    const Value value = get(taken.at[k]), held = get(best.at[k]);
                    if (!found || value > held || (is_nan(value) && !is_nan(held))) {
                        best.at[k] = taken.at[k];
                        places.at[k] = static_cast<uint8>(p * windows.kernel[1] + q);
                    }
                }
                found = true;
            }
        }
        *reinterpret_cast<Elements*>(y + place.offset(windows.y, place.row, place.column)) = best;
        *reinterpret_cast<Places*>(indices + place.offset(windows.indices, place.row, place.column)) = places;
    }
}

// Each input gathers from the windows over it, always in the same order, so that nothing is added by chance.
KERNEL max_pool_backward(TYPE* grad_x, const TYPE* grad_y, const uint8* indices, int64 count,
                         const __grid_constant__ Windows windows) {
    const int64 step = static_cast<int64>(gridDim.x) * THREADS;
    const int kernel_rows = static_cast<int>(windows.kernel[0]), kernel_columns = static_cast<int>(windows.kernel[1]);
    const int stride_rows = static_cast<int>(windows.stride[0]), stride_columns = static_cast<int>(windows.stride[1]);
    for (int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += step) {
        const Place place(windows, i, windows.height, windows.width);
        const int h = static_cast<int>(place.row + windows.padding[0]);
        const int w = static_cast<int>(place.column + windows.padding[1]);
        Value sum[WIDTH] = {};
        const int first_row = h < kernel_rows ? 0 : (h - kernel_rows) / stride_rows + 1;
        const int first_column = w < kernel_columns ? 0 : (w - kernel_columns) / stride_columns + 1;
        const int last_row = min(static_cast<int>(windows.rows) - 1, h / stride_rows);
        const int last_column = min(static_cast<int>(windows.columns) - 1, w / stride_columns);
        for (int row = first_row; row <= last_row; row++) {
            for (int column = first_column; column <= last_column; column++) {
                const int code = (h - row * stride_rows) * kernel_columns + w - column * stride_columns;
                const Elements taken = *reinterpret_cast<const Elements*>(grad_y + place.offset(windows.y, row, column));
                const Places places =
                    *reinterpret_cast<const Places*>(indices + place.offset(windows.indices, row, column));
#pragma unroll
                for (int k = 0; k < WIDTH; k++)
                    if (places.at[k] == code) sum[k] += get(taken.at[k]);
            }
        }
        Elements result;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) result.at[k] = put<TYPE>(sum[k]);
        *reinterpret_cast<Elements*>(grad_x + place.offset(windows.x, place.row, place.column)) = result;
    }
}
