// Jobs of a team of threads, against their definition. Exit status 1 if one is wrong.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

// torch's parallel_for, whose threads other than the caller's begin late.
namespace torch::stable {
inline int threads = 1;
inline int late_by = 0;  // milliseconds
inline uint32_t get_num_threads() { return threads; }
template <typename F>
void parallel_for(int64_t begin, int64_t end, int64_t, const F& f) {
  std::vector<std::thread> others;
  for (int64_t i = begin + 1; i < end; ++i) {
    others.emplace_back([&f, i] {
      std::this_thread::sleep_for(std::chrono::milliseconds(late_by));
      f(i, i + 1);
    });
  }
  f(begin, begin + 1);
  for (std::thread& other : others) other.join();
}
}  // namespace torch::stable

#include "cpu/team.h"

namespace {

using accumext::cpu::Team;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

void sleep(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

void pieces_are_run_once(int64_t count, int64_t size) {
  Team::gather(1 << 20, [&](Team& team) {
    for (int job = 0; job < 50; ++job) {  // one right after the other
      std::vector<std::atomic<int>> times(count);
      team.share(count, size, [&](int64_t begin, int64_t end, int64_t thread) {
        require(begin % size == 0 && end == std::min(begin + size, count), "edges of a piece");
        require(0 <= thread && thread < team.threads(), "number of a thread");
        for (int64_t i = begin; i < end; ++i) ++times[i];
      });
      for (const auto& t : times) require(t == 1, "a piece was not run once");
    }
  });
}

// A thread that has not come yet, or that is slow, holds back nothing but its own piece.
void nobody_waits_for_a_thread_without_a_piece() {
  torch::stable::late_by = 200;
  std::atomic<int> others = 0;
  Team::gather(8, [&](Team& team) {
    const auto begin = std::chrono::steady_clock::now();
    for (int job = 0; job < 20; ++job) {
      team.share(8, 1, [&](int64_t, int64_t, int64_t thread) { others += thread > 0; });
    }
    const auto took = std::chrono::steady_clock::now() - begin;
    require(took < std::chrono::milliseconds(100), "waited for a thread that holds no piece");
  });
  require(others == 0, "a late thread had pieces");
  torch::stable::late_by = 0;
  std::atomic<int> slow = 0;
  Team::gather(64, [&](Team& team) {
    team.share(64, 1, [&](int64_t, int64_t, int64_t thread) {
      sleep(thread == 0 ? 1 : 50);
      slow += thread > 0;
    });
  });
  require(slow < 8, "a slow thread had as many pieces as a fast one");
}

void exceptions_reach_the_caller() {
  for (const int64_t bad : {0, 7}) {  // the first pieces of two threads
    std::atomic<int> done = 0;
    bool thrown = false, went_on = false;
    try {
      Team::gather(14, [&](Team& team) {
        team.share(14, 1, [&](int64_t i, int64_t, int64_t) {
          sleep(1);
          if (i == bad) throw std::runtime_error("piece");
          ++done;
        });
        went_on = true;
      });
    } catch (const std::runtime_error& error) {
      thrown = error.what() == std::string("piece");
    }
    require(thrown && !went_on && done == 13, "an exception of a piece");
  }
  try {
    Team::gather(8, [](Team&) { throw std::runtime_error("body"); });
    require(false, "an exception of the body was lost");
  } catch (const std::runtime_error&) {
  }
}

}  // namespace

int main() {
  for (const int threads : {1, 2, 3, 8}) {
    torch::stable::threads = threads;
    for (const int64_t count : {0, 1, 2, 3, 7, 8, 9, 1000}) {
      for (const int64_t size : {1, 3, 1000}) pieces_are_run_once(count, size);
    }
  }
  torch::stable::threads = 2;
  nobody_waits_for_a_thread_without_a_piece();
  exceptions_reach_the_caller();
}
