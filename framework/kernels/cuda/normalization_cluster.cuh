// How the one-launch kernels of batch normalisation share the work: a cluster of CLUSTER blocks holds TILE channels of all
// rows in registers, and its blocks read each other's sums from shared memory.
#pragma once

constexpr int LANES = TILE / WIDTH;
constexpr int ROWS = THREADS / LANES;
constexpr int HELD = 8;  // rows that a thread keeps

#if CLUSTER > 1
#define CLUSTER_KERNEL extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)

// The forms of the barrier that do not ask a warp's threads to come together.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

__device__ __forceinline__ double load_from_block(const double* shared, int rank) {
    const uint32 own = static_cast<uint32>(__cvta_generic_to_shared(shared));
    uint32 theirs;
    double value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(own), "r"(rank));
    asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(value) : "r"(theirs) : "memory");
    return value;
}
#else
#define CLUSTER_KERNEL KERNEL
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ double load_from_block(const double* shared, int) { return *shared; }
#endif

// The sums over all rows of the cluster's channels. The caller waits for the cluster before it returns, since other
// blocks may still read from this one.
template <int SUMS>
__device__ __forceinline__ void cluster_sums(double (&sums)[SUMS][WIDTH], double (&totals)[SUMS][TILE]) {
    __shared__ double of_warp[WARPS][SUMS][TILE], of_block[SUMS][TILE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int which = 0; which < SUMS; which++) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
#pragma unroll
            for (int step = LANES; step < 32; step *= 2)
                sums[which][i] += __shfl_xor_sync(ALL_LANES, sums[which][i], step);
            if (lane < LANES) of_warp[warp][which][lane * WIDTH + i] = sums[which][i];
        }
    }
    __syncthreads();
    const int which = threadIdx.x / TILE, channel = threadIdx.x % TILE;
    if (which < SUMS) {
        double total = of_warp[0][which][channel];
#pragma unroll
        for (int w = 1; w < WARPS; w++) total += of_warp[w][which][channel];
        of_block[which][channel] = total;
    }
    __syncthreads();
    cluster_arrive();
    cluster_wait();
    if (which < SUMS) {
        double part[CLUSTER];
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) part[rank] = load_from_block(&of_block[which][channel], rank);
        double total = part[0];
#pragma unroll
        for (int rank = 1; rank < CLUSTER; rank++) total += part[rank];
        totals[which][channel] = total;
    }
    __syncthreads();
    cluster_arrive();
}

// The rows and the pack of channels that a thread holds; row number k of them is `row + k * ROWS`.
struct Hold {
    int row, stop, packs, pack;

    __device__ __forceinline__ Hold(int rows, int channels, int rows_per_block) {
        row = blockIdx.x * rows_per_block + threadIdx.x / LANES;
        stop = min(rows, static_cast<int>(blockIdx.x + 1) * rows_per_block);
        packs = channels / WIDTH;
        pack = blockIdx.y * LANES + threadIdx.x % LANES;
    }
    __device__ __forceinline__ bool has(int k) const { return row + k * ROWS < stop; }
    __device__ __forceinline__ int at(int k) const { return (row + k * ROWS) * packs + pack; }
};
