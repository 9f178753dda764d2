// Memory that the ranks of a process group share on one machine, and how they exchange bytes by it.
//
// A rank writes its bytes to a slot of its own and counts up. When all have counted, each reads all
// slots. Two sets of slots take turns. Before a rank writes to a set again, it has seen all others
// count in the exchange between, which they do after reading the set. So one wait per exchange is
// enough.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace mtpc {

/// One rank's view of the memory. A rank may be in one exchange at a time.
class GroupMemory {
 public:
  /// The bytes of each rank in an exchange, by rank.
  using Parts = std::vector<const char*>;

  /// Maps a file of zeros, of `bytes_of` bytes.
  ///
  /// processes: ids by rank; a rank whose process ends is noticed. timeout_s: how long to wait for a
  /// rank that lives.
  GroupMemory(const std::string& path, int64_t slot_bytes, int64_t rank,
              const std::vector<int64_t>& processes, double timeout_s)
      : rank_(rank), ranks_(processes.size()), slot_bytes_(slot_bytes), timeout_s_(timeout_s) {
    if (rank < 0 || rank >= ranks_ || ranks_ > kMostRanks || slot_bytes < 1 || slot_bytes % kLine) {
      throw std::runtime_error("memory of ranks: the rank or the size of a slot is out of range");
    }
    try {
      map(path);
      for (const int64_t process : processes) watch(process);
    } catch (...) {
      release();
      throw;
    }
  }

  ~GroupMemory() { release(); }
  GroupMemory(const GroupMemory&) = delete;
  GroupMemory& operator=(const GroupMemory&) = delete;

  int64_t rank() const { return rank_; }
  int64_t ranks() const { return ranks_; }

  /// Exchanges bytes in parts of at most a slot.
  ///
  /// Each rank gives the same kind and the same `most`, and `bytes` <= `most` bytes of its own.
  /// read(parts, begin, count) gets, of each rank, the bytes from `begin` on: `count` of them, or as
  /// many as the rank has. Parts begin on a cache line.
  template <class Read>
  void exchange(int64_t kind, int64_t most, const void* own, int64_t bytes, const Read& read) {
    for (int64_t begin = 0; begin < most; begin += slot_bytes_) {
      const int64_t set = count_ % 2;
      const int64_t given = std::clamp<int64_t>(bytes - begin, 0, slot_bytes_);
      if (given) std::memcpy(slot(set, rank_), static_cast<const char*>(own) + begin, given);
      post(set, most * kKinds + kind);
      Parts parts;
      for (int64_t other = 0; other < ranks_; ++other) {
        wait_for(other, set, most * kKinds + kind);
        parts.push_back(slot(set, other));
      }
      read(parts, begin, std::min(slot_bytes_, most - begin));
    }
  }

 private:
  static constexpr int64_t kLine = 64, kKinds = 16, kHeaderBytes = 4096;
  static constexpr int64_t kMostRanks = kHeaderBytes / kLine - 1;
  /// A wait begins with so many pauses, some 20 microseconds. Then it lets others run, and after
  /// `kYield` it sleeps between two looks.
  static constexpr int kPauses = 400;
  static constexpr auto kYield = std::chrono::milliseconds(2);
  static constexpr auto kLook = std::chrono::milliseconds(50);
  static constexpr long kSleepNs = 50'000;

  /// What a rank has written, in a cache line of its own.
  struct alignas(kLine) Posted {
    std::atomic<int64_t> count;
    /// What the last exchange by each set was.
    std::atomic<int64_t> what[2];
  };
  /// 1 + the rank that one of the others has lost; 0 while all are there.
  struct alignas(kLine) Lost {
    std::atomic<int64_t> rank;
  };
  static_assert(std::atomic<int64_t>::is_always_lock_free, "processes share no locks");
  static_assert(sizeof(Posted) == kLine && sizeof(Lost) == kLine);

  int64_t bytes() const { return kHeaderBytes + 2 * ranks_ * slot_bytes_; }
  Lost& lost() const { return *reinterpret_cast<Lost*>(memory_); }
  Posted& posted(int64_t rank) const {
    return reinterpret_cast<Posted*>(memory_ + kLine)[rank];
  }
  char* slot(int64_t set, int64_t rank) const {
    return memory_ + kHeaderBytes + (set * ranks_ + rank) * slot_bytes_;
  }

  void map(const std::string& path) {
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat found;
    const bool fits = file >= 0 && fstat(file, &found) == 0 && found.st_size == bytes();
    void* mapped = MAP_FAILED;
    if (fits) mapped = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    const int error = errno;
    if (file >= 0) close(file);
    if (mapped == MAP_FAILED) {
      throw std::runtime_error("cannot map " + path + ", expected " + std::to_string(bytes()) +
                               " bytes: " + std::strerror(error));
    }
    memory_ = static_cast<char*>(mapped);
  }

  /// Opens a descriptor of a process, which becomes readable when the process ends.
  void watch(int64_t process) {
#if defined(SYS_pidfd_open)
    const int file = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(process), 0));
#else
    const int file = -1;
    errno = ENOSYS;
#endif
    if (file < 0) {
      throw std::runtime_error("cannot watch process " + std::to_string(process) + ": " +
                               std::strerror(errno));
    }
    watched_.push_back({file, POLLIN, 0});
  }

  void release() {
    for (const pollfd& each : watched_) close(each.fd);
    if (memory_) munmap(memory_, bytes());
  }

  void post(int64_t set, int64_t what) {
    check_lost();
    posted(rank_).what[set].store(what, std::memory_order_relaxed);
    posted(rank_).count.store(++count_, std::memory_order_release);
  }

  /// Waits until a rank has written to its slot of a set.
  void wait_for(int64_t other, int64_t set, int64_t what) {
    for (int i = 0; i < kPauses && !has_posted(other); ++i) pause();
    if (!has_posted(other)) wait_long(other);
    if (posted(other).what[set].load(std::memory_order_relaxed) != what) {
      lose(other, "is in another exchange than this one");
    }
  }

  bool has_posted(int64_t other) const {
    return posted(other).count.load(std::memory_order_acquire) >= count_;
  }

  void wait_long(int64_t other) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    auto next_look = start + kLook;
    while (!has_posted(other)) {
      const auto now = Clock::now();
      if (now - start < kYield) {
        sched_yield();
        continue;
      }
      const timespec sleep{0, kSleepNs};
      nanosleep(&sleep, nullptr);
      check_lost();
      if (now < next_look) continue;
      next_look = now + kLook;
      const int64_t ended = find_ended();
      if (ended >= 0 && !has_posted(other)) lose(ended, "has ended");
      if (std::chrono::duration<double>(now - start).count() > timeout_s_ && !has_posted(other)) {
        lose(other, "has not answered for " + std::to_string(std::llround(timeout_s_)) + " s");
      }
    }
  }

  /// A rank whose process has ended; -1 if none has. No rank can have finished the exchange that
  /// this one waits for, so a rank that ended did so because of a failure.
  int64_t find_ended() {
    if (poll(watched_.data(), watched_.size(), 0) > 0) {
      for (int64_t rank = 0; rank < ranks_; ++rank) {
        if (watched_[rank].revents) return rank;
      }
    }
    return -1;
  }

  void check_lost() const {
    const int64_t found = lost().rank.load(std::memory_order_relaxed);
    if (found) throw std::runtime_error(said(found - 1, "is lost to the others"));
  }

  [[noreturn]] void lose(int64_t other, const std::string& why) const {
    lost().rank.store(other + 1, std::memory_order_relaxed);
    throw std::runtime_error(said(other, why));
  }

  std::string said(int64_t other, const std::string& why) const {
    return "rank " + std::to_string(other) + " of " + std::to_string(ranks_) + " " + why;
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  int64_t rank_, ranks_, slot_bytes_;
  double timeout_s_;
  char* memory_ = nullptr;
  std::vector<pollfd> watched_;
  /// Exchanges so far.
  int64_t count_ = 0;
};

}  // namespace mtpc
