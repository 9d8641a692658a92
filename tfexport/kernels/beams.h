// The part of a step of beam search between two runs of the step graph, as `rank_continuations` and `let_go_on` of
// search/beam.py, `Best.without` of runtimes/outputs.py and runtimes/shared_cache_mask.py define it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace tfexport {

// The arrays of a batch. runtimes/ort_cpu/native_beams.py has the same fields.
struct Beams {
  int64_t sentences;    // live ones
  int64_t places;       // in the buffers of the step graph, some of which may be idle
  int64_t beam;         // hypotheses of a sentence
  int64_t width;        // hypotheses of a sentence that the step graph computes: 1 if all are equal, else `beam`
  int64_t slots;        // of the cache, for a place
  int64_t best;         // best tokens of a row
  int64_t candidates;   // continuations of a sentence to return
  int64_t eos;          // the end token of the model
  int64_t banned_size;
  int64_t ends_size;
  const int64_t* place;          // of each live sentence, [sentences]
  const int64_t* banned;         // ids, [banned_size]
  const int64_t* ends;           // ids after which a hypothesis leaves the beam, [ends_size]
  const float* best_log_probs;   // [places, width, best]
  const int64_t* best_ids;       // [places, width, best]
  double* log_probs;             // of live hypotheses, [sentences, beam]
  int64_t* tokens;               // the input of the step graph, [places, width]
  int32_t* position;             // the input of the step graph, [places, width]
  int64_t* slot;                 // the first slot of the last step, [places]
  uint8_t* mask;                 // the slots that each hypothesis sees, [places, beam, slots]
  double* candidate_log_probs;   // the continuations of each step, [steps, sentences, candidates]
  int64_t* candidate_parents;
  int64_t* candidate_tokens;
};

namespace beams {

struct Candidate {
  double log_prob;
  int64_t order;  // beam * best + rank
  int64_t token;
};

inline bool contains(const int64_t* ids, int64_t size, int64_t id) { return std::find(ids, ids + size, id) != ids + size; }

// Appends the best tokens of a row that are not banned, or eos if all possible tokens are banned. Others follow with -inf.
inline void append_allowed(const Beams& self, const float* log_probs, const int64_t* ids, double before, int64_t order,
                           std::vector<Candidate>& candidates) {
  bool is_stuck = self.banned_size > 0;
  for (int64_t i = 0; i < self.best && is_stuck; ++i) {
    is_stuck = !(log_probs[i] > -INFINITY) || contains(self.banned, self.banned_size, ids[i]);
  }
  const auto is_banned = [&](int64_t id) {
    return is_stuck ? id != self.eos : contains(self.banned, self.banned_size, id);
  };
  int64_t count = 0;
  for (int64_t i = 0; i < self.best && count < self.candidates; ++i) {
    if (!is_banned(ids[i])) candidates.push_back({before + log_probs[i], order + count++, ids[i]});
  }
  for (int64_t i = 0; i < self.best && count < self.candidates; ++i) {
    if (is_banned(ids[i])) candidates.push_back({-INFINITY, order + count++, ids[i]});
  }
}

// Moves the first `beam` candidates that do not end to the live hypotheses of a sentence. Returns whether one of the first
// `beam` candidates ends.
inline bool let_go_on(const Beams& self, int64_t sentence, const std::vector<Candidate>& candidates, int64_t per_row,
                      std::vector<uint8_t>& rows) {
  const int64_t place = self.place[sentence], size = self.beam * self.slots;
  uint8_t* mask = self.mask + place * size;
  std::copy_n(mask, size, rows.begin());
  const auto ends = [&](const Candidate& each) { return contains(self.ends, self.ends_size, each.token); };
  bool has_ended = false;
  int64_t live = 0;
  const auto keep = [&](const Candidate& each, double log_prob) {
    self.log_probs[sentence * self.beam + live] = log_prob;
    if (self.width == self.beam) self.tokens[place * self.beam + live] = each.token;
    std::copy_n(rows.begin() + each.order / per_row * self.slots, self.slots, mask + live * self.slots);
    ++live;
  };
  for (int64_t i = 0; i < self.candidates && live < self.beam; ++i) {
    if (!ends(candidates[i])) keep(candidates[i], candidates[i].log_prob);
    has_ended |= i < self.beam && ends(candidates[i]);
  }
  // Fewer continue only where an end is forced. Then the sentence is over.
  for (int64_t i = 0; live < self.beam; ++i) {
    if (ends(candidates[i])) keep(candidates[i], -INFINITY);
  }
  return has_ended;
}

}  // namespace beams

// Lets each hypothesis see the slot that the next run of the step graph writes for it.
inline void see_next_slots(const Beams& self) {
  for (int64_t sentence = 0; sentence < self.sentences; ++sentence) {
    const int64_t place = self.place[sentence];
    for (int64_t k = 0; k < self.beam; ++k) {
      self.mask[(place * self.beam + k) * self.slots + self.slot[place] + k] = 1;
    }
  }
}

// Ranks the continuations of step `step` and moves the inputs of the step graph on, unless `is_last`. Returns whether the
// next step is the caller's to decide: it was the last, a hypothesis ended, or a number is not finite (then the
// log-probabilities of the sentence are NaN).
inline bool advance(const Beams& self, int64_t step, bool is_last) {
  const int64_t per_row = std::min(self.best, self.candidates);
  bool stops = is_last;
  std::vector<beams::Candidate> candidates;
  candidates.reserve(self.beam * per_row);
  std::vector<uint8_t> rows(self.beam * self.slots);
  for (int64_t sentence = 0; sentence < self.sentences; ++sentence) {
    candidates.clear();
    bool is_finite = true;
    for (int64_t k = 0; k < self.beam; ++k) {
      const int64_t row = self.place[sentence] * self.width + (self.width == self.beam ? k : 0);
      const float* log_probs = self.best_log_probs + row * self.best;
      is_finite &= std::isfinite(log_probs[0]);
      beams::append_allowed(self, log_probs, self.best_ids + row * self.best, self.log_probs[sentence * self.beam + k],
                            k * per_row, candidates);
    }
    const int64_t start = (step * self.sentences + sentence) * self.candidates;
    if (!is_finite) {
      std::fill_n(self.candidate_log_probs + start, self.candidates, NAN);
      std::fill_n(self.candidate_parents + start, self.candidates, 0);
      std::fill_n(self.candidate_tokens + start, self.candidates, 0);
      stops = true;
      continue;
    }
    std::partial_sort(candidates.begin(), candidates.begin() + self.candidates, candidates.end(),
                      [](const beams::Candidate& a, const beams::Candidate& b) {
                        return a.log_prob > b.log_prob || (a.log_prob == b.log_prob && a.order < b.order);
                      });
    for (int64_t i = 0; i < self.candidates; ++i) {
      self.candidate_log_probs[start + i] = candidates[i].log_prob;
      self.candidate_parents[start + i] = candidates[i].order / per_row;
      self.candidate_tokens[start + i] = candidates[i].token;
    }
    stops |= beams::let_go_on(self, sentence, candidates, per_row, rows);
  }
  for (int64_t place = 0; place < self.places; ++place) self.slot[place] += self.beam;
  for (int64_t row = 0; row < self.places * self.width; ++row) ++self.position[row];
  if (!stops) see_next_slots(self);
  return stops;
}

}  // namespace tfexport
