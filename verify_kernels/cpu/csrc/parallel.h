// Work shared out to threads, unit by unit. Which thread does a unit never changes what the unit computes.
#pragma once
#include <cstdint>

namespace sd {

// Runs unit(context, u) for every u in [0, units) on up to `threads` threads and returns when all are done.
// The caller works too, and waits only for units that another thread has begun: a worker that the system has
// descheduled, or that still sleeps, costs nothing. (An OpenMP barrier waits for every thread to arrive, which on
// a machine with anything else to do multiplied a step's time by twenty.)
void run_units(int threads, int units, void (*unit)(void*, int), void* context);

template <class Body>
void for_units(int threads, int units, Body body) {
  if (threads <= 1 || units <= 1) {
    for (int u = 0; u < units; ++u) body(u);
    return;
  }
  run_units(threads, units, [](void* context, int u) { (*static_cast<Body*>(context))(u); }, &body);
}

}  // namespace sd
