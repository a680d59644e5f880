// The threads that compute a step together: the caller, and helpers that the process keeps, asleep between steps.
//
//   caller    serial ── share: turn, turn, turn ─ wait ── serial ── share: turn …
//   helper    asleep ── woken ─── turn, turn ───┘ spin ─────────────── turn ─ spin ─ asleep
//
// Nobody waits for a thread that has no core. Work is taken turn by turn by whoever is there, and the caller waits for
// turns that were begun, never for a thread to come. A wait spins for some microseconds, or as long as a turn takes, and
// sleeps then: its core is free for the thread that is waited for. Sleepers are woken for parts that are worth it, and
// only as many as those are worth. A helper that lost its core while the caller slept for it leaves the work to the
// others for a while. Callers have the helpers for a part, not for a step. Who computes what changes no bit of a result.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <deque>
#include <new>
#include <thread>
#include <utility>

#include "amx.h"

namespace sluice {

using Time = std::chrono::steady_clock;

constexpr std::chrono::microseconds kSpin{20};  // a wait for what comes soon; sleeping and waking takes about as long
constexpr std::chrono::microseconds kMostSpin{200};  // of a wait for turns, however long they are
constexpr int kRest = 16;  // times as long as it had no core while the caller slept for it, a helper rests
constexpr std::chrono::milliseconds kMostRest{30};
constexpr int kTurnsAhead = 4;  // turns for each thread that are left when several are no longer taken at once
constexpr int kMostTurns = 8;  // taken at once: neighbours, so that what is fetched ahead is the thread's own
constexpr int64_t kTurnWork = 8192;  // multiplications of a turn at least: about two microseconds
constexpr int64_t kWakeWork = 1 << 19;  // multiplications of a part for each sleeper that it wakes: some 50 microseconds

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// Looks for a while whether something holds.
template <class F>
inline bool spins_until(Time::duration limit, F holds) {
  if (holds()) return true;
  for (const Time::time_point end = Time::now() + limit; Time::now() < end; pause())
    if (holds()) return true;
  return holds();
}

inline int own_nice() { return getpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid))); }

// Time that this thread has had a core.
inline Time::duration own_cpu() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

// How long a helper rests that made the caller sleep, by the time that its turns took and the time that it had a core.
inline Time::duration rest_after(Time::duration wall, Time::duration cpu) {
  return 4 * cpu > 3 * wall ? Time::duration{0} : std::min<Time::duration>(kRest * (wall - cpu), kMostRest);
}

// Where one thread sleeps until something holds that another thread brings about and then rings for.
class alignas(64) Bell {
 public:
  template <class F>
  void sleep_until(F holds) {
    while (true) {
      const uint32_t heard = rings_.load();
      has_sleeper_.store(true);
      if (holds()) break;
      syscall(SYS_futex, &rings_, FUTEX_WAIT_PRIVATE, heard, nullptr, nullptr, 0);
    }
    has_sleeper_.store(false);
  }

  // Wakes whoever sleeps; costs next to nothing if nobody does. Whether somebody may have.
  bool ring() {
    if (!has_sleeper_.load() || !has_sleeper_.exchange(false)) return false;
    rings_.fetch_add(1);
    syscall(SYS_futex, &rings_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    return true;
  }

 private:
  std::atomic<uint32_t> rings_{0};
  std::atomic<bool> has_sleeper_{false};
};

// The helpers of a process. One caller at a time has them, for one part; who finds them taken computes alone.
class Team {
 public:
  using Turn = void (*)(const void* work, int thread, int64_t first, int64_t end);

  // Returns the team, or null if somebody has it or there is no memory. Helpers have the priority of the thread that made
  // them, and none but a privileged one could raise it: a caller with a better one, as after a gentle start, gets new ones.
  static Team* take(int nice) noexcept {
    // a child of the process has none of its helpers, nor whoever had them
    [[maybe_unused]] static const int is_told = pthread_atfork(nullptr, nullptr, [] {
      team_ = nullptr;
      give_back();
    });
    if (is_taken_.exchange(true)) return nullptr;
    if (team_ != nullptr && nice < team_->nice_) std::exchange(team_, nullptr)->dismiss();
    try {
      if (team_ == nullptr) team_ = new Team;
    } catch (const std::bad_alloc&) {
      give_back();
      return nullptr;
    }
    return team_;
  }
  static void give_back() { is_taken_.store(false); }

  // Returns how many threads there are, the caller among them: as many as are wanted, or as the system gives.
  int grow(int num_threads, int nice) noexcept {
    try {
      for (; num_threads_ < num_threads; num_threads_++) {
        called_.resize(static_cast<size_t>(num_threads_));
        std::thread(&Team::help, this, num_threads_, &called_.back()).detach();
        nice_ = std::max(nice_, nice);
      }
    } catch (...) {  // no memory, or no thread
    }
    return std::min(num_threads, num_threads_);
  }

  // Does turns [0, num_turns) by up to so many threads, of whom the first ones are woken; returns when all are done.
  void run(int num_threads, int num_woken, int64_t num_turns, const void* work, Turn turn) {
    work_ = work;
    turn_ = turn;
    num_turns_ = num_turns;
    undone_.store(num_turns);
    open_.store(static_cast<uint64_t>(num_threads) << 32 | static_cast<uint64_t>(num_turns));
    for (int i = 0; i < num_woken; i++) called_[static_cast<size_t>(i)].ring();
    Time::time_point before = Time::now();
    Time::duration turn_time = kMostSpin;  // the shortest of the caller's: in others it may have had no core
    while (const int64_t taken = take_turns(0)) {
      undone_.fetch_sub(taken);
      const Time::time_point now = Time::now();
      turn_time = std::min(turn_time, (now - before) / taken);
      before = now;
    }
    const auto is_done = [this] { return undone_.load() == 0; };
    if (!spins_until(std::min<Time::duration>(kSpin + 2 * turn_time, kMostSpin), is_done)) done_.sleep_until(is_done);
  }

 private:
  // Ends the helpers; the little memory that they look at stays.
  void dismiss() {
    is_dismissed_.store(true);
    for (Bell& called : called_) called.ring();
  }

  // Whether there are turns to take for this thread.
  bool is_open(int thread) const {
    const uint64_t open = open_.load();
    return static_cast<uint32_t>(open) != 0 && static_cast<uint64_t>(thread) < open >> 32;
  }

  // Takes some of the turns that are open and does them; returns how many, 0 if there are none.
  int64_t take_turns(int thread) {
    uint64_t open = open_.load();
    int64_t count;
    do {
      const int64_t left = static_cast<uint32_t>(open), num_threads = open >> 32;
      if (left == 0 || thread >= num_threads) return 0;
      count = std::clamp<int64_t>(left / (num_threads * kTurnsAhead), 1, kMostTurns);
    } while (!open_.compare_exchange_weak(open, open - static_cast<uint64_t>(count)));
    const int64_t first = num_turns_ - static_cast<uint32_t>(open);  // of this work: it is not over before these turns
    turn_(work_, thread, first, first + count);
    return count;
  }

  // Body of a helper.
  void help(int thread, Bell* called) {
    while (!is_dismissed_.load()) {
      called->sleep_until([=] { return is_open(thread) || is_dismissed_.load(); });
#if SLUICE_AMX
      const Tiles tiles;
#endif
      while (spins_until(kSpin, [=] { return is_open(thread); })) {
        const Time::time_point began = Time::now();
        const Time::duration had = own_cpu();
        while (const int64_t taken = take_turns(thread)) {
          if (undone_.fetch_sub(taken) != taken || !done_.ring()) continue;
          const Time::duration rest = rest_after(Time::now() - began, own_cpu() - had);
          if (rest > Time::duration{0}) std::this_thread::sleep_for(rest);
          break;  // what is open now is another part
        }
      }
    }
  }

  // Whose they are stays as it is at the process's end: the helpers sleep there.
  static inline std::atomic<bool> is_taken_{false};
  static inline Team* team_ = nullptr;

  // What is written by one and read by others lies apart from what others write.
  int num_threads_ = 1;
  int nice_ = -20;           // the worst of the helpers'
  std::deque<Bell> called_;  // one for each helper, which stays where it is
  alignas(64) const void* work_ = nullptr;  // these three belong to whoever has taken a turn that is not done
  Turn turn_ = nullptr;
  int64_t num_turns_ = 0;
  std::atomic<bool> is_dismissed_{false};
  alignas(64) std::atomic<uint64_t> open_{0};   // threads that may take turns, and turns that nobody has taken
  alignas(64) std::atomic<int64_t> undone_{0};  // turns that are not done
  Bell done_;
};

// Who computes one call: a caller, and as many others as it wants, if it finds them, for each part.
class Crew {
 public:
  explicit Crew(int num_threads) : num_threads_(num_threads), nice_(num_threads > 1 ? own_nice() : 0) {}
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls f(thread, unit) for units [0, num_units), each once, neighbours by one thread; the caller is thread 0.
  // `unit_work`: multiplications of a unit, or what takes as long. f throws nothing.
  template <class F>
  void share(int64_t num_units, int64_t unit_work, const F& f) const {
    const int64_t per_turn = std::max<int64_t>(1, kTurnWork / std::max<int64_t>(1, unit_work));
    const int64_t num_turns = (num_units + per_turn - 1) / per_turn;
    const auto turns = [&](int thread, int64_t first, int64_t end) {
      for (int64_t unit = first * per_turn; unit < std::min(end * per_turn, num_units); unit++) f(thread, unit);
    };
    Team* const team = num_threads_ > 1 && num_turns > 1 ? Team::take(nice_) : nullptr;
    if (team == nullptr) return turns(0, 0, num_turns);
    num_threads_ = team->grow(num_threads_, nice_);
    const int64_t num_woken = std::min({num_threads_ - int64_t{1}, num_turns - 1, num_units * unit_work / kWakeWork});
    team->run(num_threads_, static_cast<int>(num_woken), num_turns, &turns, [](const void* work, int thread, int64_t first, int64_t end) {
      (*static_cast<const decltype(turns)*>(work))(thread, first, end);
    });
    Team::give_back();
  }

 private:
  mutable int num_threads_;  // that are wanted; fewer once the system gives no more
  const int nice_;
};

}  // namespace sluice
