// The calling thread and its OpenMP team, each on a core of its own.
#pragma once

#include <c10/util/Exception.h>
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

namespace relevo {

// As many threads as cores. Those of a thread that computes later on are another team.
inline void pin_threads(const std::vector<int64_t>& cores) {
  const auto is_known = [](int64_t core) { return core >= 0 && core < CPU_SETSIZE; };
  TORCH_CHECK(std::all_of(cores.begin(), cores.end(), is_known),
      "expected numbers of cores, each less than ", CPU_SETSIZE);
  std::atomic<int> failure = 0;
#pragma omp parallel num_threads(cores.size())
  {
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(cores[omp_get_thread_num()], &own);
    if (sched_setaffinity(0, sizeof(own), &own)) failure = errno;
  }
  TORCH_CHECK(!failure, "these cores are not to be had: ", std::strerror(failure));
}

}  // namespace relevo
