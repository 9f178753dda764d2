// Work in stages on one parallel region: each stage's tasks begin when those before it are done.
//
// A region for each stage would cost more than starting threads: between two regions an operator's
// host code runs, and the stage before has filled the caches with weights. In one region, a worker
// without tasks can also fetch the weights that the next stage begins with.
#pragma once

#include <thread>

#include "tensors.h"

namespace mtpc {

/// A stage's tasks, in a share for each worker. Other stages may take its memory when it is done.
class StageTasks {
 public:
  void begin(int64_t count, int64_t workers) {
    if (static_cast<int64_t>(shares_.size()) != workers) shares_ = std::vector<Share>(workers);
    for (int64_t w = 0; w < workers; ++w) {
      shares_[w].set(count * w / workers, count * (w + 1) / workers);
    }
    count_ = count;
    done_ = 0;
  }

  /// Runs body(run) for runs of up to `most` tasks of worker `me`'s share, then for others', until
  /// none is left. It must not throw: others wait for the tasks.
  template <class Body>
  void run(int64_t me, int64_t most, const Body& body) {
    int64_t done = 0;
    const auto finish = [&](Tasks run) {
      body(run);
      done += run.count;
    };
    for (Tasks run; (run = shares_[me].take_first(most)).count > 0;) finish(run);
    for (Share& share : shares_) {
      for (Tasks run; (run = share.take_last()).count > 0;) finish(run);
    }
    done_.fetch_add(done, std::memory_order_release);  // Once, because all workers poll it.
  }

  /// Returns when the tasks of all workers are done; calls meanwhile() again and again.
  template <class Body>
  void wait(Body meanwhile) const {
    constexpr int64_t kSpins = 1 << 14;
    for (int64_t spins = 0; done_.load(std::memory_order_acquire) < count_; ++spins) {
      meanwhile();
      if (spins > kSpins) std::this_thread::yield();  // A late worker may need this processor.
    }
  }

 private:
  int64_t count_ = 0;
  std::vector<Share> shares_;
  alignas(64) std::atomic<int64_t> done_{0};
};

/// Fetches a part of memory into the second-level cache, a little at each call. By loads: a Zen 5
/// drops most fetch instructions that come faster than memory answers.
class Warming {
 public:
  Warming(const char* from, int64_t bytes) : from_(from), end_(from + bytes) {}

  void operator()() {
    constexpr int64_t kLine = 64, kLines = 8;
    if (from_ >= end_) return relax();
    for (const char* stop = std::min(end_, from_ + kLines * kLine); from_ < stop; from_ += kLine) {
      static_cast<void>(*static_cast<const volatile char*>(from_));
    }
  }

 private:
  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  const char *from_, *end_;
};

/// Runs work(me) on up to `workers` of torch's threads, me from 0 on. Torch may run fewer threads,
/// so each must take over the tasks of workers that do not run.
template <class Work>
void run_workers(int64_t workers, const Work& work) {
  if (workers <= 1) return work(0);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, workers, 1, [&](int64_t, int64_t) { work(next++); });
}

}  // namespace mtpc
