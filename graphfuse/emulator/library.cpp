// The way into a shared library with one kernel, for a process or program that it is loaded into.
#include "launch.hpp"

extern "C" const char* gf_run(const GfLaunch* launch, const unsigned char* arguments) {
  return gf_launch(launch, gf_kernel, arguments);
}
