// How the two passes of batch normalisation over large images share the work: which rows and channels a block takes in the
// first, the sums over all blocks at its end, and what a thread walks over in the second.
#pragma once

// A block covers 64 channels (32 where elements are moved one by one) by a chunk of rows; its threads stand
// LANES packs wide and ROWS rows deep.
constexpr int LANES = 64 / WIDTH < 32 ? 64 / WIDTH : 32;
constexpr int TILE = LANES * WIDTH;
constexpr int ROWS = THREADS / LANES;

struct Tile {
    int pack, row, stop;
    bool active;

    __device__ __forceinline__ Tile(int rows, int packs, int rows_per_block) {
        pack = blockIdx.y * LANES + threadIdx.x % LANES;
        active = pack < packs;
        // The last rows first: what was written last, and what the next pass reads first, is then still in the cache.
        const int chunk = gridDim.x - 1 - blockIdx.x;
        row = chunk * rows_per_block + threadIdx.x / LANES;
        stop = min(rows, (chunk + 1) * rows_per_block);
    }
};

// Adds up both sums over all rows. True in the one block of each tile of channels that comes last, which finds the
// totals of its TILE channels in `totals`. float64 and a fixed order make the result exact enough and reproducible.
__device__ __forceinline__ bool finish_sums(double (&sums)[2][WIDTH], double2* parts, uint32* counters, double2* totals) {
    __shared__ double of_warp[WARPS][2][TILE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int which = 0; which < 2; which++) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
#pragma unroll
            for (int step = LANES; step < 32; step *= 2)
                sums[which][i] += __shfl_xor_sync(ALL_LANES, sums[which][i], step);
            if (lane < LANES) of_warp[warp][which][lane * WIDTH + i] = sums[which][i];
        }
    }
    __syncthreads();
    parts += static_cast<int64>(blockIdx.y) * gridDim.x * TILE;
    if (threadIdx.x < TILE) {
        double2 part = make_double2(0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            part.x += of_warp[w][0][threadIdx.x];
            part.y += of_warp[w][1][threadIdx.x];
        }
        __stcg(&parts[blockIdx.x * TILE + threadIdx.x], part);
    }
    if (!is_last_block(&counters[blockIdx.y], gridDim.x)) return false;

    constexpr int GROUPS = THREADS / TILE, UNROLL = 16;
    __shared__ double2 of_group[GROUPS][TILE];
    const int channel = threadIdx.x % TILE, group = threadIdx.x / TILE;
    double2 total = make_double2(0, 0);
    for (int chunk = group; chunk < gridDim.x; chunk += UNROLL * GROUPS) {
        double2 part[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            part[k] = chunk + k * GROUPS < gridDim.x ? __ldcg(&parts[(chunk + k * GROUPS) * TILE + channel])
                                                     : make_double2(0, 0);
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            total.x += part[k].x;
            total.y += part[k].y;
        }
    }
    of_group[group][channel] = total;
    __syncthreads();
    if (threadIdx.x < TILE) {
        total = of_group[0][channel];
#pragma unroll
        for (int g = 1; g < GROUPS; g++) {
            total.x += of_group[g][channel].x;
            total.y += of_group[g][channel].y;
        }
        totals[channel] = total;
    }
    __syncthreads();
    return true;
}

// What a thread of the second pass works on: every step-th pack of memory, all of the same channels, since the host
// makes step a multiple of the packs of a row.
struct Walk {
    int first, step, channel;

    __device__ __forceinline__ Walk(int packs) {
        first = blockIdx.x * THREADS + threadIdx.x;
        step = gridDim.x * THREADS;
        channel = first % packs * WIDTH;
    }
};
