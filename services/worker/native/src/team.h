// The threads that compute a step together: the caller, and helpers that the process keeps, asleep between steps.
//
//   caller    serial ── share: turn, turn, turn ─ wait ── serial ── share: turn …
//   helper    asleep ── woken ─── turn, turn ───┘ spin ─────────────── turn ─ spin ─ asleep
//
// Nobody waits for a thread that has no core. Work is taken turn by turn by whoever is there, and the caller waits for
// turns that were begun, never for a thread to come. A wait spins for some microseconds, or as long as a turn takes, and
// sleeps then: its core is free for the thread that is waited for. A helper whose turn made the caller sleep had lost its
// core; it leaves the work to the others for many times as long. Who computes what changes no bit of a result.
#pragma once

#include <linux/futex.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#include "amx.h"

namespace sluice {

using Time = std::chrono::steady_clock;

constexpr std::chrono::microseconds kSpin{20};  // a wait for what comes soon; sleeping and waking takes about as long
constexpr int kRest = 16;  // times as long as the turn took that made the caller sleep, a helper rests
constexpr int kTurnsAhead = 4;  // turns for each thread that are left when several are no longer taken at once
constexpr int kMostTurns = 8;  // taken at once: neighbours, so that what is fetched ahead is the thread's own
constexpr int64_t kTurnWork = 8192;  // multiplications of a turn at least: about two microseconds

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

// Where threads sleep until something holds that another thread brings about and then rings for.
class Bell {
 public:
  template <class F>
  void sleep_until(F holds) {
    while (true) {
      const uint32_t heard = rings_.load();
      has_sleepers_.store(true);
      if (holds()) return;
      syscall(SYS_futex, &rings_, FUTEX_WAIT_PRIVATE, heard, nullptr, nullptr, 0);
    }
  }

  // Wakes whoever sleeps; costs next to nothing if nobody does. Whether somebody may have.
  bool ring() {
    if (!has_sleepers_.load() || !has_sleepers_.exchange(false)) return false;
    rings_.fetch_add(1);
    syscall(SYS_futex, &rings_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    return true;
  }

 private:
  std::atomic<uint32_t> rings_{0};
  std::atomic<bool> has_sleepers_{false};
};

// The helpers of a process. One caller at a time has them; who finds them taken computes alone.
class Team {
 public:
  using Turn = void (*)(const void* work, int thread, int64_t first, int64_t end);

  // Returns the team, or null if somebody has it. Helpers have the priority of the thread that made them, and none but a
  // privileged one could raise it: a caller with a better one, as after a gentle start, gets new ones.
  static Team* take() {
    if (!taken().try_lock()) return nullptr;
    static Team* team = nullptr;  // left as it is at the process's end: the helpers sleep there
    if (team != nullptr && own_nice() < team->nice_) {
      team->dismiss();
      team = nullptr;
    }
    if (team == nullptr) team = new Team;
    return team;
  }
  static void give_back() { taken().unlock(); }

  // Returns how many threads there are, the caller among them: as many as are wanted, or as the system gives.
  int grow(int num_threads) {
    if (num_threads_ < num_threads) nice_ = std::max(nice_, own_nice());
    try {
      for (; num_threads_ < num_threads; num_threads_++) std::thread(&Team::help, this, num_threads_).detach();
    } catch (const std::system_error&) {
    }
    return std::min(num_threads, num_threads_);
  }

  // Does turns [0, num_turns) by up to so many threads; returns when all are done.
  void run(int num_threads, int64_t num_turns, const void* work, Turn turn) {
    work_ = work;
    turn_ = turn;
    num_turns_ = num_turns;
    undone_.store(num_turns);
    open_.store(static_cast<uint64_t>(num_threads) << 32 | static_cast<uint64_t>(num_turns));
    called_.ring();
    Time::time_point before = Time::now();
    while (int64_t taken = take_turns(0)) {
      undone_.fetch_sub(taken);
      const Time::time_point now = Time::now();
      turn_time_ = now - before;
      before = now;
    }
    const auto is_done = [this] { return undone_.load() == 0; };
    if (!spins_until(kSpin + 2 * turn_time_, is_done)) done_.sleep_until(is_done);
  }

 private:
  static std::mutex& taken() {
    static std::mutex& taken = *new std::mutex;
    return taken;
  }

  static int own_nice() { return getpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid))); }

  // Ends the helpers; the little memory that they look at stays.
  void dismiss() {
    is_dismissed_.store(true);
    called_.ring();
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
  void help(int thread) {
    while (!is_dismissed_.load()) {
      called_.sleep_until([=] { return is_open(thread) || is_dismissed_.load(); });
#if SLUICE_AMX
      const Tiles tiles;
#endif
      while (spins_until(kSpin, [=] { return is_open(thread); })) {
        const Time::time_point began = Time::now();
        const int64_t taken = take_turns(thread);
        const bool was_waited_for = taken > 0 && undone_.fetch_sub(taken) == taken && done_.ring();
        if (was_waited_for) std::this_thread::sleep_for(kRest * (Time::now() - began));
      }
    }
  }

  int num_threads_ = 1;
  int nice_ = -20;  // the worst of the helpers'
  std::atomic<bool> is_dismissed_{false};
  std::atomic<uint64_t> open_{0};    // threads that may take turns, and turns that nobody has taken
  std::atomic<int64_t> undone_{0};   // turns that are not done
  const void* work_ = nullptr;       // these three belong to whoever has taken a turn that is not done
  Turn turn_ = nullptr;
  int64_t num_turns_ = 0;
  Time::duration turn_time_{0};      // of the caller's last turns
  Bell called_, done_;
};

// Who computes one call: as many threads as are wanted, while it lives.
class Crew {
 public:
  explicit Crew(int num_threads)
      : team_(num_threads > 1 ? Team::take() : nullptr), num_threads_(team_ == nullptr ? 1 : team_->grow(num_threads)) {}
  ~Crew() {
    if (team_ != nullptr) Team::give_back();
  }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls f(thread, unit) for units [0, num_units), each once, `per_turn` neighbours by one thread; the caller is thread 0.
  // f throws nothing.
  template <class F>
  void share(int64_t num_units, int64_t per_turn, const F& f) const {
    const int64_t num_turns = (num_units + per_turn - 1) / per_turn;
    const auto turns = [&](int thread, int64_t first, int64_t end) {
      for (int64_t unit = first * per_turn; unit < std::min(end * per_turn, num_units); unit++) f(thread, unit);
    };
    if (num_threads_ == 1 || num_turns <= 1) return turns(0, 0, num_turns);
    team_->run(num_threads_, num_turns, &turns, [](const void* work, int thread, int64_t first, int64_t end) {
      (*static_cast<const decltype(turns)*>(work))(thread, first, end);
    });
  }

 private:
  Team* team_;
  const int num_threads_;
};

// Units of so much work each that make a turn.
inline int64_t units_per_turn(int64_t unit_work) { return std::max<int64_t>(1, kTurnWork / std::max<int64_t>(1, unit_work)); }

}  // namespace sluice
