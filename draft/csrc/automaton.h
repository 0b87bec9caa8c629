// A suffix automaton that grows token by token and counts its contexts, and cursors that match sequences in it.
#pragma once
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace sd {

constexpr int COUNTED_SUFFIXES = 32;  // suffixes whose counts each token raises; bounds the cost on repetitive text
constexpr int32_t BREAK = -1;         // token between two texts: no sequence holds it, so no match crosses it
constexpr int MAX_FOLLOWERS = 64;     // followers read of a context; a context with more predicts badly
constexpr int32_t NONE = -2;          // token of a state without followers
constexpr size_t FEW = 16;            // followers of a state that are searched one by one

// Online suffix automaton (Blumer et al. 1985): O(1) amortised per token.
//
// State s stands for contexts of up to length(s) tokens, all longer than length(link(s)). count(s) is their number of
// occurrences, exact for the COUNTED_SUFFIXES longest contexts at each token and a lower bound for shorter ones. State 0
// is the empty context. Most states have one follower, which they hold themselves; a `Branch` holds the further ones of
// the few that branch.
class Automaton {
 public:
  Automaton() { add_state(0, NONE, 0); states_[0].link = -1; }

  int64_t size() const { return size_; }
  int32_t link(int32_t state) const { return states_[state].link; }
  int32_t length(int32_t state) const { return states_[state].length; }
  int32_t count(int32_t state) const { return states_[state].count; }
  // The state of the longest suffix that occurs earlier too.
  int32_t repeated() const { return last_ ? states_[last_].link : 0; }

  void append(int32_t token) {
    ++size_;
    const int32_t added = add_state(states_[last_].length + 1, NONE, 0);
    int32_t state = last_, target = -1;
    while (state != -1 && (target = follow(state, token)) == -1) {
      add_follower(state, token, added);
      state = states_[state].link;
    }
    if (target == -1) {
      states_[added].link = 0;
    } else {
      const bool whole = states_[target].length == states_[state].length + 1;
      states_[added].link = whole ? target : split(state, token, target);
    }
    last_ = added;
    for (int32_t s = added, n = 0; s > 0 && n < COUNTED_SUFFIXES; s = states_[s].link, ++n) ++states_[s].count;
  }

  // The state after `token` in the contexts of `state`; -1 if it never followed them.
  int32_t follow(int32_t state, int32_t token) {
    int32_t* next = find(state, token);
    return next ? *next : -1;
  }

  // Calls each(token, state after it) for what followed `state`, in order of first occurrence.
  template <class Each>
  void followers(int32_t state, Each each) const {
    const State& at = states_[state];
    if (at.token == NONE) return;
    each(at.token, at.next);
    if (at.branch < 0) return;
    int left = MAX_FOLLOWERS;
    for (const auto& [token, next] : branches_[at.branch].more) {
      if (--left == 0) return;
      each(token, next);
    }
  }

 private:
  struct State {
    int32_t length, link, count;
    int32_t token, next;  // the first follower, and the state after it
    int32_t branch;       // index of the further ones; -1: none
  };

  struct Branch {
    std::vector<std::pair<int32_t, int32_t>> more;  // (token, state after it)
    std::unordered_map<int32_t, int32_t> places;    // in `more`, by token, once there are more than FEW

    int32_t* find(int32_t token) {
      if (more.size() > FEW) {
        auto place = places.find(token);
        return place == places.end() ? nullptr : &more[place->second].second;
      }
      for (auto& [each, next] : more) {
        if (each == token) return &next;
      }
      return nullptr;
    }

    void add(int32_t token, int32_t next) {
      more.emplace_back(token, next);
      if (more.size() <= FEW) return;
      for (size_t i = places.size(); i < more.size(); ++i) places[more[i].first] = (int32_t)i;
    }
  };

  int32_t* find(int32_t state, int32_t token) {
    State& at = states_[state];
    if (at.token == token) return &at.next;
    return at.branch < 0 ? nullptr : branches_[at.branch].find(token);
  }

  void add_follower(int32_t state, int32_t token, int32_t next) {
    State& at = states_[state];
    if (at.token == NONE) {
      at.token = token;
      at.next = next;
      return;
    }
    if (at.branch < 0) {
      at.branch = (int32_t)branches_.size();
      branches_.emplace_back();
    }
    branches_[at.branch].add(token, next);
  }

  // A new state for the contexts of `target` that are a context of `state` followed by `token`.
  int32_t split(int32_t state, int32_t token, int32_t target) {
    const int32_t clone = add_state(states_[state].length + 1, states_[target].token, states_[target].next);
    if (states_[target].branch >= 0) {
      states_[clone].branch = (int32_t)branches_.size();
      branches_.push_back(Branch(branches_[states_[target].branch]));
    }
    states_[clone].link = states_[target].link;
    states_[clone].count = states_[target].count;
    states_[target].link = clone;
    for (int32_t* next; state != -1 && (next = find(state, token)) && *next == target; state = states_[state].link) {
      *next = clone;
    }
    return clone;
  }

  int32_t add_state(int32_t length, int32_t token, int32_t next) {
    states_.push_back({length, -1, 0, token, next, -1});
    return (int32_t)states_.size() - 1;
  }

  std::vector<State> states_;
  std::vector<Branch> branches_;
  int32_t last_ = 0;
  int64_t size_ = 0;
};

constexpr int WINDOW = 32;  // tokens from which a match is rebuilt; a longer match predicts no better

// The longest suffix of a sequence in an automaton's text, O(1) amortised per token, by matching statistics (Chang and
// Lawler 1994). `state` is the automaton's state of that suffix, `length` its tokens. When the automaton has grown, states
// may be split and longer matches possible, so the last WINDOW tokens are matched again.
class Cursor {
 public:
  explicit Cursor(std::shared_ptr<Automaton> automaton) : automaton(std::move(automaton)) {}

  std::shared_ptr<Automaton> automaton;
  int32_t state = 0, length = 0;

  // Processes the new ones of a sequence's `n` tokens; the earlier ones have not changed.
  void follow(const int32_t* tokens, int64_t n) {
    if (automaton->size() != size_ || n - position_ > WINDOW) {
      size_ = automaton->size();
      state = length = 0;
      position_ = n > WINDOW ? n - WINDOW : 0;
    }
    while (position_ < n) step(tokens[position_++]);
  }

  // Appends `token` to the sequence. If the text has grown meanwhile, `length` may be too large until the match ends.
  void step(int32_t token) {
    int32_t target = automaton->follow(state, token);
    while (target < 0 && state) {
      state = automaton->link(state);
      length = automaton->length(state);
      target = automaton->follow(state, token);
    }
    state = target < 0 ? 0 : target;
    length = target < 0 ? 0 : length + 1;
  }

 private:
  int64_t position_ = 0, size_ = 0;
};

}  // namespace sd
