// What followed the longest suffixes of a sequence in its own text and in stores of earlier texts.
#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "automaton.h"
#include "best_first.h"

namespace sd {
namespace {

// At most `limit` tokens of text. Text is appended to the young generation. When that holds half of the limit, it becomes
// the old generation, and the previous old one is dropped: an automaton cannot drop single texts. Text that is used again
// is written to the young generation again (`Writer` skips only what that holds), so text in use stays.
struct Store {
  explicit Store(int64_t limit) : half(std::max<int64_t>(1, limit / 2)) {}

  int64_t half;
  std::shared_ptr<Automaton> young = std::make_shared<Automaton>(), old = std::make_shared<Automaton>();

  void make_room() {
    if (young->size() < half) return;
    old = std::move(young);
    young = std::make_shared<Automaton>();
  }

  void append(int32_t token) {
    make_room();
    young->append(token);
  }
};

constexpr int KNOWN_TOKENS = 32;    // least length of a match whose tokens are not written again
constexpr int OVERLAP_TOKENS = 16;  // known tokens written on either side of new ones, so that contexts span the boundary

// Writes a text to a store, except the parts that the store's young generation holds.
//
// An editor sends the same file again and again, with small changes. A cursor matches the text ahead of the writing. A
// token is known if it lies in a match of at least KNOWN_TOKENS, which is decided once the current match, whose start
// never moves back, begins after it. Between two adjacent matches lies a seam, which is new although both sides are known.
class Writer {
 public:
  Writer(Store* store, const int32_t* tokens) : store_(store), tokens_(tokens), into_(store->young) {}

  void write(int64_t n) {
    Cursor cursor(store_->young);
    for (int64_t read = 1; read <= n; ++read) {
      if (store_->young != cursor.automaton) cursor = Cursor(store_->young);  // a new generation, which is empty
      cursor.step(tokens_[read - 1]);
      if (cursor.length >= KNOWN_TOKENS) known_ = read;
      // No match holds the runs across the start of a match of at most OVERLAP_TOKENS.
      decide(read - cursor.length, cursor.length <= OVERLAP_TOKENS);
    }
    decide(n, false);
  }

 private:
  void decide(int64_t upto, bool seam) {
    for (; decided_ < upto; ++decided_) {
      if (decided_ >= known_ || (seam && decided_ == upto - 1)) {
        append(decided_);
        trailing_ = OVERLAP_TOKENS;
      } else if (trailing_) {
        append(decided_);
        --trailing_;
      }
    }
  }

  void append(int64_t at) {
    store_->make_room();
    if (written_ != at || store_->young != into_) {
      into_ = store_->young;
      if (into_->size()) store_->append(BREAK);
      for (int64_t i = std::max<int64_t>(0, at - OVERLAP_TOKENS); i < at; ++i) store_->append(tokens_[i]);
    }
    store_->append(tokens_[at]);
    written_ = at + 1;
  }

  Store* store_;
  const int32_t* tokens_;
  std::shared_ptr<Automaton> into_;  // generation of the last write
  int64_t decided_ = 0;              // tokens that are written or skipped: up to the start of the current match
  int64_t written_ = -1;             // end of the last written run; -1: none
  int64_t known_ = 0;                // end of the last match of at least KNOWN_TOKENS
  int64_t trailing_ = 0;             // known tokens left to write after a new one
};

// The longest suffix of the path to a node that a text holds.
struct TextContext {
  std::shared_ptr<Automaton> text;
  int32_t state, length;
};

// Indexes the text of a sequence and matches its end in the texts of the stores, which outlive it.
class SuffixReader : public BestFirst<TextContext> {
 public:
  // other: texts of the request beside the sequence's own, each with a BREAK at its end.
  SuffixReader(std::vector<Store*> stores, const int32_t* other, int64_t n_other)
      : stores_(std::move(stores)), other_(other, other + n_other) {}

  // Indexes at most `budget` tokens of the other texts and then of `text`, and reduces `budget` by their number. Looks
  // for the longest suffixes of `text`; returns the tokens of the longest one.
  int32_t match(const int32_t* text, int64_t n, int64_t& budget) {
    for (; budget > 0 && !other_.empty(); --budget) {
      own_->append(other_.front());
      other_.pop_front();
    }
    for (; budget > 0 && indexed_ < n; --budget) own_->append(text[indexed_++]);
    std::vector<TextContext> found;
    const int32_t own = own_->repeated();
    if (indexed_ == n && own > 0) found.push_back({own_, own, own_->length(own)});
    std::vector<Cursor> cursors;
    for (const Store* store : stores_) {
      for (const auto& each : {store->young, store->old}) {
        if (!each->size()) continue;
        auto known = std::find_if(cursors_.begin(), cursors_.end(), [&](auto& c) { return c.automaton == each; });
        Cursor& cursor = cursors.emplace_back(known == cursors_.end() ? Cursor(each) : *known);
        cursor.follow(text, n);
        if (cursor.state) found.push_back({each, cursor.state, cursor.length});
      }
    }
    cursors_ = std::move(cursors);
    return set_roots(std::move(found));
  }

 protected:
  std::vector<Follower<TextContext>> followers(TextContext& context) override {
    auto& [text, state, length] = context;
    std::vector<Follower<TextContext>> found;
    while (state > 0) {
      text->followers(state, [&](int32_t token, int32_t next) {
        if (token >= 0) found.push_back({token, text->count(next), {text, next, length + 1}});
      });
      if (!found.empty()) break;
      state = text->link(state);  // the end of a text: shorter contexts may occur elsewhere too
      length = text->length(state);
    }
    return found;
  }

 private:
  std::vector<Store*> stores_;
  std::deque<int32_t> other_;  // what is left to index of the other texts
  int64_t indexed_ = 0;        // tokens of the text that are indexed
  std::shared_ptr<Automaton> own_ = std::make_shared<Automaton>();
  std::vector<Cursor> cursors_;
};

}  // namespace
}  // namespace sd

extern "C" {

sd::Store* sd_store_new(int64_t limit) { return new sd::Store(limit); }
void sd_store_free(sd::Store* store) { delete store; }

void sd_store_write(sd::Store* store, const int32_t* tokens, int64_t n) { sd::Writer(store, tokens).write(n); }

sd::SuffixReader* sd_suffix_new(sd::Store** stores, int32_t n_stores, const int32_t* other, int64_t n_other) {
  return new sd::SuffixReader({stores, stores + n_stores}, other, n_other);
}
void sd_suffix_free(sd::SuffixReader* reader) { delete reader; }
int32_t sd_suffix_match(sd::SuffixReader* reader, const int32_t* text, int64_t n, int64_t* budget) {
  return reader->match(text, n, *budget);
}
int32_t sd_suffix_next(sd::SuffixReader* reader, int32_t node, double score, int32_t width, sd::Candidate* out) {
  return reader->next(node, score, width, *out);
}
}
