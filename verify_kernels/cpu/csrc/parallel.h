// Distributes work to threads, unit by unit. A unit's result does not depend on its thread.
#pragma once
#include <cstdint>

namespace sd {

// Runs unit(context, u) for every u in [0, units) on up to `threads` threads and returns when all are done.
// The caller works too, and waits only for units that another thread has begun: a worker that is descheduled or asleep
// costs nothing. (An OpenMP barrier waits for every thread, which on a busy machine took twenty times as long.)
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
