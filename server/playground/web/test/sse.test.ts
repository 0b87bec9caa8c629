import assert from "node:assert/strict";
import { test } from "node:test";
import { readEvents, SseParser } from "../src/sse";

const STREAM = 'data: {"a":1}\n\n: a remark\nevent: x\ndata: two\ndata:  lines\n\r\ndata: x\r\ndata: y\r\n\r\ndata:[DONE]\r\n\r\n';
const EVENTS = ['{"a":1}', "two\n lines", "x\ny", "[DONE]"];

test("events are the same however the stream is cut", () => {
  for (let first = 0; first <= STREAM.length; first++)
    for (let second = first; second <= STREAM.length; second++) {
      const parser = new SseParser();
      const pieces = [STREAM.slice(0, first), STREAM.slice(first, second), STREAM.slice(second)];
      assert.deepEqual(pieces.flatMap((piece) => parser.push(piece)), EVENTS, `${first} ${second}`);
    }
});

test("an event without its empty line is not complete", () => {
  const parser = new SseParser();
  assert.deepEqual(parser.push("data: a\n"), []);
  assert.deepEqual(parser.push("\n"), ["a"]);
  assert.deepEqual(parser.push("\n\n"), []);
});

test("a character may be cut in the middle", async () => {
  const bytes = new TextEncoder().encode("data: ü€🙂\n\n");
  const body = new ReadableStream<Uint8Array>({
    start(controller) {
      for (const byte of bytes) controller.enqueue(Uint8Array.of(byte));
      controller.close();
    },
  });
  const found: string[] = [];
  for await (const event of readEvents(body)) found.push(event);
  assert.deepEqual(found, ["ü€🙂"]);
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
