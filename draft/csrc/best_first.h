// Trees of the likeliest continuations first, from counts of what followed contexts of several lengths.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <queue>
#include <utility>
#include <vector>

namespace sd {

constexpr int MAX_CONTEXTS = 4;            // of a root, the longest ones; further ones gain less acceptance than its noise
constexpr double MAX_SHARED_CHANCE = 0.9;  // sum of the children's chances above which shorter contexts are not consulted

// The fit to source code that `Shares` describes
constexpr double BRANCHING_POWER = 1.5;  // of a follower's share: a context that branched before tends to branch again
constexpr double LENGTH_WEIGHT = 0.4;    // per token of the context
constexpr double COUNT_POWER = 0.7;      // of the number of times that the context was seen

// A node to propose. Mirrors Candidate in draft/lookups.py.
struct Candidate {
  double chance;
  int32_t parent, token, rank;
};

// A token that followed a context, how often, and the context that ends in it.
template <class Context>
struct Follower {
  int32_t token;
  int64_t count;
  Context behind;
};

template <class Context>
struct Child {
  double chance;
  int32_t token;
  std::vector<Context> contexts;
};

// The likeliest next tokens, from what followed contexts of falling length. The longest context gives each token that
// followed it
//
//     share^1.5 (1 - 1 / ((1 + 0.4 length) seen^0.7))
//
// of the chance. The next longest distributes the rest, as in prediction by partial matching (Cleary and Witten 1984).
// The constants are a fit to source code: how often the most frequent follower recurred, by the length of the context
// and the number of times that it was seen.
template <class Context>
class Shares {
 public:
  // Adds what followed the next longest context; returns whether shorter ones are not needed.
  bool add(int32_t length, const std::vector<Follower<Context>>& followers) {
    double total = 0;
    for (const auto& each : followers) total += each.count;
    const double trusted = left_ * (1.0 - 1.0 / ((1.0 + LENGTH_WEIGHT * length) * std::pow(total, COUNT_POWER)));
    for (const auto& each : followers) {
      const double chance = trusted * std::pow(each.count / total, BRANCHING_POWER);
      left_ -= chance;
      auto known = std::find_if(found_.begin(), found_.end(), [&](const auto& c) { return c.token == each.token; });
      if (known == found_.end()) {
        found_.push_back({chance, each.token, {each.behind}});
      } else {
        known->chance += chance;
        known->contexts.push_back(each.behind);
      }
    }
    return left_ < 1.0 - MAX_SHARED_CHANCE;
  }

  std::vector<Child<Context>> best(int32_t width) {
    std::stable_sort(found_.begin(), found_.end(), [](const auto& a, const auto& b) { return a.chance > b.chance; });
    if ((int32_t)found_.size() > width) found_.resize(width);
    return std::move(found_);
  }

 private:
  double left_ = 1.0;
  std::vector<Child<Context>> found_;
};

// What may follow one sequence, candidate by candidate.
template <class Context>
class BestFirst {
 public:
  virtual ~BestFirst() = default;

  // Returns the likeliest candidate that is left in `out`; false: there is none. node: that of the candidate before, 0
  // for the root, -1 if it was refused. score: of that node, the log of its chance. width: its children at most.
  bool next(int32_t node, double score, int32_t width, Candidate& out) {
    if (node == 0) {
      heads_ = {};
      order_ = 0;
      contexts_ = roots_;
    }
    if (node >= 0 && width > 0) {
      Shares<Context> shares;
      for (Context& context : contexts_) {
        const auto found = followers(context);
        if (!found.empty() && shares.add(context.length, found)) break;
      }
      int32_t rank = 0;
      for (auto& child : shares.best(width)) {
        heads_.push({-score - std::log(child.chance), order_++, {child.chance, node, child.token, rank++},
                     std::move(child.contexts)});
      }
    }
    if (heads_.empty()) return false;
    out = heads_.top().candidate;
    contexts_ = heads_.top().contexts;
    heads_.pop();
    return true;
  }

 protected:
  // Takes the contexts of the root, and returns the tokens of the longest one.
  int32_t set_roots(std::vector<Context> found) {
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.length > b.length; });
    if (found.size() > MAX_CONTEXTS) found.resize(MAX_CONTEXTS);
    roots_ = std::move(found);
    return roots_.empty() ? 0 : roots_[0].length;
  }

  // What followed `context`. If nothing did, it may be replaced by a shorter one.
  virtual std::vector<Follower<Context>> followers(Context& context) = 0;

 private:
  struct Head {
    double cost;    // minus the node's score
    int32_t order;  // breaks ties, so that trees are reproducible
    Candidate candidate;
    std::vector<Context> contexts;
    bool operator<(const Head& other) const {  // the largest is popped first
      return cost != other.cost ? cost > other.cost : order > other.order;
    }
  };

  std::vector<Context> roots_, contexts_;
  std::priority_queue<Head> heads_;
  int32_t order_ = 0;
};

}  // namespace sd
