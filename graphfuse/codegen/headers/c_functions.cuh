// Functions of C that scalar forms call and no header does: the kernels of programs with such steps include it. On a GPU
// they are CUDA's own: rintf and truncf exact, log2f within 2 ulp.
#pragma once
#ifndef __CUDACC__
extern "C" {
float log2f(float) noexcept;
float rintf(float) noexcept;
float truncf(float) noexcept;
}
#endif
