// Threads that share one job after another, piece by piece. torch's parallel_for cuts a job into
// equal parts in advance and waits for all threads; on a machine with other work to do, one of them
// often has no processor, and every job would take as long as that lasts. Here a thread takes
// another piece when it has finished one, and nobody waits for a thread that has none.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace accumext::cpu {

class Team {
 public:
  // Calls body(team) on this thread. Until it returns, torch's other threads take pieces of the
  // jobs that it shares; `pieces` is the largest number of pieces of a job. torch's own operators
  // have this thread alone meanwhile.
  template <typename F>
  static void gather(int64_t pieces, const F& body) {
    const int64_t threads = torch::stable::get_num_threads();
    Team team(std::max<int64_t>(1, std::min(threads, pieces)));
    torch::stable::parallel_for(0, team.threads(), 1, [&](int64_t thread, int64_t) {
      if (thread > 0) return team.serve(thread);
      team.attempt([&] { body(team); });
      team.announce(kDismissed);
    });
    if (team.error_) std::rethrow_exception(team.error_);
  }

  // Calls f for the pieces of one job alone.
  template <typename F>
  static void once(int64_t count, int64_t size, const F& f) {
    gather((count + size - 1) / size, [&](Team& team) { team.share(count, size, f); });
  }

  int64_t threads() const { return static_cast<int64_t>(shares_.size()); }

  // Calls f(begin, end, thread) for pieces of [0, count): of `size` each, and what is left. Which
  // thread gets a piece is arbitrary, but each begins with its own share of them, the same for
  // every job of as many pieces: so it often finds in its cache what it wrote for the last one.
  template <typename F>
  void share(int64_t count, int64_t size, const F& f) {
    const int64_t pieces = (count + size - 1) / size;
    const auto run = [&](int64_t piece, int64_t thread) {
      f(piece * size, std::min((piece + 1) * size, count), thread);
    };
    if (threads() == 1 || pieces <= 1) {
      for (int64_t piece = 0; piece < pieces; ++piece) run(piece, 0);
      return;
    }
    job_ = {.run = [](const void* job, int64_t piece,
                      int64_t thread) { (*static_cast<const decltype(run)*>(job))(piece, thread); },
            .context = &run,
            .pieces = pieces};
    unfinished_.store(static_cast<int>(pieces), std::memory_order_relaxed);
    for (int64_t t = 0; t < threads(); ++t) {
      shares_[t].left.store(first_of(t + 1) - first_of(t), std::memory_order_release);
    }
    jobs_ = (jobs_ + 1) & kMostJobs;
    announce(jobs_);
    work(0);
    await(unfinished_, [](int left) { return left == 0; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  explicit Team(int64_t threads) : shares_(threads) {}

  // The number of a thread's pieces that nobody has taken. It is 0 while a job is set up, and a job
  // lasts until each piece that was taken is finished; so whoever takes a piece can read the job.
  struct alignas(64) Share {
    std::atomic<int64_t> left{0};
  };

  struct Job {
    void (*run)(const void* context, int64_t piece, int64_t thread);
    const void* context;
    int64_t pieces;
  };

  int64_t first_of(int64_t thread) const { return job_.pieces * thread / threads(); }

  // Takes pieces as long as there are any: of its own share, then of others'.
  void work(int64_t thread) {
    for (int64_t i = 0; i < threads(); ++i) {
      const int64_t of = (thread + i) % threads();
      std::atomic<int64_t>& left = shares_[of].left;
      int64_t seen = left.load(std::memory_order_acquire);
      while (seen > 0) {
        if (!left.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) continue;
        finish(first_of(of + 1) - seen, thread);
        seen = left.load(std::memory_order_acquire);
      }
    }
  }

  // Keeps an exception, for the thread of the body to throw.
  template <typename F>
  void attempt(const F& f) {
    try {
      f();
    } catch (...) {
      const std::lock_guard lock(error_mutex_);
      error_ = std::current_exception();
    }
  }

  void finish(int64_t piece, int64_t thread) {
    attempt([&] { job_.run(job_.context, piece, thread); });
    if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_all();
  }

  void serve(int64_t thread) {
    for (int seen = news_.load(std::memory_order_acquire); seen != kDismissed;
         seen = await(news_, [&](int now) { return now != seen; })) {
      work(thread);
    }
  }

  void announce(int news) {
    news_.store(news, std::memory_order_release);
    news_.notify_all();
  }

  // Waits until the value is as wanted, and returns it: awake for as long as the thread that it
  // waits for usually takes, then asleep, so that this thread may run here if it runs nowhere.
  template <typename Wanted>
  static int await(const std::atomic<int>& value, const Wanted& wanted) {
    constexpr int kPauses = 4000;  // 50 to 200 microseconds, as long as a piece
    int seen = value.load(std::memory_order_acquire);
    for (int i = 0; i < kPauses && !wanted(seen); ++i) {
#if defined(__x86_64__)
      _mm_pause();
#endif
      seen = value.load(std::memory_order_acquire);
    }
    while (!wanted(seen)) {
      value.wait(seen, std::memory_order_acquire);
      seen = value.load(std::memory_order_acquire);
    }
    return seen;
  }

  static constexpr int kDismissed = -1;
  static constexpr int kMostJobs = 0x7fffffff;

  std::vector<Share> shares_;
  Job job_{};
  int jobs_ = 0;
  alignas(64) std::atomic<int> news_{0};  // the number of the last job
  alignas(64) std::atomic<int> unfinished_{0};
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

}  // namespace accumext::cpu
