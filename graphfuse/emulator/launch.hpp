// How the machine is asked to run a kernel.
#pragma once

/// As engine.Launch. schedule: 0 runs threads in order, 1 the last first, others are seeds of random orders. ranks: of
/// so many, each of which makes `calls` launches one after another, as on a stream of its own; all ranks run at the same
/// time. Each launch has argument_bytes of arguments, those of a rank one behind another.
struct GfLaunch {
  unsigned grid, block, cluster, cooperative;
  unsigned ranks, calls;
  unsigned long long argument_bytes;
  unsigned long long shared_bytes;
  unsigned long long schedule;
};

/// A kernel with its arguments where they are packed as in C.
using GfKernel = void (*)(const unsigned char* arguments);

/// Runs it to its end. Null, or what went wrong, which stays valid until the next launch.
extern "C" const char* gf_launch(const GfLaunch* launch, GfKernel kernel, const unsigned char* arguments);

/// The kernel of this library.
extern "C" void gf_kernel(const unsigned char* arguments);

/// Runs it, as gf_launch does.
extern "C" const char* gf_run(const GfLaunch* launch, const unsigned char* arguments);
