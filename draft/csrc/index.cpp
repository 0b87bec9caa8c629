// What followed the longest suffixes of a sequence in index files: a text of tokens and its suffix array, mapped.
#include <algorithm>
#include <vector>

#include "best_first.h"

namespace sd {
namespace {

constexpr int SAMPLES = 16;  // entries of a frequent span whose followers are read

// Mirrors IndexText in draft/token_index.py. A file that was replaced may be damaged, so that each position is checked.
struct IndexText {
  const uint32_t* tokens;    // [n], big-endian
  const uint32_t* suffixes;  // [n]: positions of tokens, in the order of what follows
  const uint32_t* starts;    // [separator + 1]: the first suffix that begins with each token
  int64_t n;
  uint32_t separator;  // token after every file; none of the vocabulary

  // The token `offset` after the beginning of entry `at` of the suffix array; the separator beyond the end.
  uint32_t token(int64_t at, int64_t offset) const {
    const int64_t position = suffixes[at] + offset;
    return position < n ? __builtin_bswap32(tokens[position]) : separator;
  }

  // How the tokens from `offset` on of entry `at` compare with a pattern of `length`: below 0 if less, 0 if equal.
  int64_t compare(int64_t at, int32_t offset, const int32_t* pattern, int32_t length) const {
    int64_t order = 0;
    for (int32_t i = 0; i < length && !order; ++i) order = (int64_t)token(at, offset + i) - pattern[i];
    return order;
  }

  // The first entry in [low, high) that compares as at least `order` with the pattern: 0 for the first that is not less,
  // 1 for the first that is greater.
  int64_t bound(int64_t low, int64_t high, int32_t offset, const int32_t* pattern, int32_t length, int order) const {
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (compare(middle, offset, pattern, length) < order) low = middle + 1; else high = middle;
    }
    return low;
  }

  int64_t start(int32_t token) const { return std::min<int64_t>(starts[token], n); }
};

// Entries [low, high) of the suffix array, which share their first `length` tokens.
struct Span {
  const IndexText* index;
  int64_t low, high;
  int32_t length;
};

class IndexReader : public BestFirst<Span> {
 public:
  // Looks for the longest suffixes of `context` in the indexes; returns the tokens of the longest one.
  int32_t match(const IndexText* const* indexes, int32_t n_indexes, const int32_t* context, int32_t n) {
    std::vector<Span> found;
    for (int32_t i = 0; i < n_indexes; ++i) match_one(*indexes[i], context, n, found);
    return set_roots(std::move(found));
  }

 protected:
  // Of a frequent span, the tokens that follow SAMPLES evenly spaced entries.
  std::vector<Follower<Span>> followers(Span& span) override {
    const auto& [index, low, high, length] = span;
    std::vector<Follower<Span>> found;
    const int64_t size = high - low, n = std::min<int64_t>(size, SAMPLES);
    int64_t end = low;  // of the entries with the token before
    for (int64_t i = 0; i < n && end < high; ++i) {
      const int64_t at = low + i * size / n;
      if (at < end) continue;
      const int32_t token = index->token(at, length);
      const int64_t first = index->bound(end, at, length, &token, 1, 0);
      const bool is_last = index->compare(high - 1, length, &token, 1) == 0;
      end = is_last ? high : index->bound(at + 1, high, length, &token, 1, 1);
      if ((uint32_t)token != index->separator) found.push_back({token, end - first, {index, first, end, length + 1}});
    }
    return found;
  }

 private:
  // Adds the longest suffix of `context` in the text, and suffixes of half and a quarter of its length, and so on, that
  // occur more often.
  static void match_one(const IndexText& index, const int32_t* context, int32_t n, std::vector<Span>& found) {
    for (int32_t i = 0; i < n; ++i) {
      if (context[i] < 0 || (uint32_t)context[i] >= index.separator) return;
    }
    const auto bound = [&](int32_t length, int64_t low, int order) {
      const int32_t* pattern = context + n - length;
      return index.bound(low, index.start(pattern[0] + 1), 0, pattern, length, order);
    };
    const auto first = [&](int32_t length) { return bound(length, index.start(context[n - length]), 0); };
    int32_t length = 0;
    for (int32_t least = 1, most = n; least <= most;) {  // the lengths that are still in question
      const int32_t middle = std::min(2 * least - 1, (least + most) / 2);  // most matches are short
      const int64_t low = first(middle);
      if (low < index.n && index.compare(low, 0, context + n - middle, middle) == 0) {
        length = middle;
        least = middle + 1;
      } else {
        most = middle - 1;
      }
    }
    for (int64_t most = 0; length; length /= 2) {
      const int64_t low = first(length), high = bound(length, low, 1);
      if (high - low > most) found.push_back({&index, low, high, length});
      most = std::max(most, high - low);
    }
  }
};

}  // namespace
}  // namespace sd

extern "C" {

sd::IndexReader* sd_index_new() { return new sd::IndexReader(); }
void sd_index_free(sd::IndexReader* reader) { delete reader; }
int32_t sd_index_match(sd::IndexReader* reader, const sd::IndexText* const* indexes, int32_t n_indexes,
                       const int32_t* context, int32_t n) {
  return reader->match(indexes, n_indexes, context, n);
}
int32_t sd_index_next(sd::IndexReader* reader, int32_t node, double score, int32_t width, sd::Candidate* out) {
  return reader->next(node, score, width, *out);
}
}
