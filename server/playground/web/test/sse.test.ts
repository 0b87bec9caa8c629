import assert from "node:assert/strict";
import { test } from "node:test";
import { readEvents } from "../src/sse";

async function read(pieces: Uint8Array[]): Promise<string[]> {
  const body = new ReadableStream<Uint8Array>({
    start(controller) {
      for (const piece of pieces) controller.enqueue(piece);
      controller.close();
    },
  });
  const found: string[] = [];
  for await (const event of readEvents(body)) found.push(event);
  return found;
}

test("events are the same however the stream is cut, inside a character too", async () => {
  const bytes = new TextEncoder().encode('data: {"a":"\\n"}\n\n:\n\ndata: ü🙂\n\ndata: [DONE]\n\n');
  for (let first = 0; first <= bytes.length; first++)
    for (let second = first; second <= bytes.length; second++) {
      const pieces = [bytes.slice(0, first), bytes.slice(first, second), bytes.slice(second)];
      assert.deepEqual(await read(pieces), ['{"a":"\\n"}', "ü🙂", "[DONE]"], `${first} ${second}`);
    }
});

test("an event without its empty line is not complete", async () => {
  assert.deepEqual(await read([new TextEncoder().encode("data: a\n\ndata: b\n")]), ["a"]);
});

test("who stops reading lets go of the stream", async () => {
  let cancelled = false;
  const body = new ReadableStream<Uint8Array>({
    pull: (controller) => controller.enqueue(new TextEncoder().encode("data: a\n\n")),
    cancel: () => {
      cancelled = true;
    },
  });
  for await (const event of readEvents(body)) {
    assert.equal(event, "a");
    break;
  }
  assert.ok(cancelled);
});
