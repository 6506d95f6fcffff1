/* The words of portable integer kernels: one text for CUDA (NVRTC), HIP (clang) and OpenCL C 1.2.
 *
 *   ACL_KERNEL void name(ACL_GLOBAL const u64 *x, ..., i64 n)    an entry point
 *   ACL_DEVICE                                                   a function it calls
 *   ACL_LOCAL u64 tile[64];                                      memory of a block, declared in the kernel
 *
 * No templates; no address-space qualifier on helper arguments except ACL_GLOBAL. */
#if defined(__OPENCL_VERSION__)
typedef uint u32;
typedef ulong u64;
typedef int i32;
typedef long i64;
#define ACL_KERNEL __kernel
#define ACL_DEVICE static inline
#define ACL_GLOBAL __global
#define ACL_LOCAL __local
#define ACL_CONSTANT __constant
#define acl_global_id() ((i64)get_global_id(0))
#define acl_local_id() ((i32)get_local_id(0))
#define acl_local_size() ((i32)get_local_size(0))
#define acl_group_id() ((i64)get_group_id(0))
#define acl_barrier() barrier(CLK_LOCAL_MEM_FENCE)
#define acl_mul_high_u32(a, b) mul_hi((u32)(a), (u32)(b))
#define acl_mul_high_u64(a, b) mul_hi((u64)(a), (u64)(b))
#else
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
#define ACL_GLOBAL
#if defined(__HIP__)
#define ACL_KERNEL extern "C" __attribute__((global))
#define ACL_DEVICE static inline __attribute__((device))
#define ACL_LOCAL static __attribute__((shared))
#define ACL_CONSTANT static __attribute__((constant))
#define acl_local_id() ((i32)__builtin_amdgcn_workitem_id_x())
#define acl_local_size() ((i32)__builtin_amdgcn_workgroup_size_x())
#define acl_group_id() ((i64)__builtin_amdgcn_workgroup_id_x())
#define acl_barrier() __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "workgroup"), __builtin_amdgcn_s_barrier()
#define acl_mul_high_u32(a, b) ((u32)(((u64)(u32)(a) * (u32)(b)) >> 32))
#define acl_mul_high_u64(a, b) ((u64)(((unsigned __int128)(u64)(a) * (u64)(b)) >> 64))
#else
#define ACL_KERNEL extern "C" __global__
#define ACL_DEVICE static __device__ __forceinline__
#define ACL_LOCAL __shared__
#define ACL_CONSTANT static __constant__
#define acl_local_id() ((i32)threadIdx.x)
#define acl_local_size() ((i32)blockDim.x)
#define acl_group_id() ((i64)blockIdx.x)
#define acl_barrier() __syncthreads()
#define acl_mul_high_u32(a, b) __umulhi((u32)(a), (u32)(b))
#define acl_mul_high_u64(a, b) __umul64hi((u64)(a), (u64)(b))
#endif
#define acl_global_id() (acl_group_id() * acl_local_size() + acl_local_id())
#endif
