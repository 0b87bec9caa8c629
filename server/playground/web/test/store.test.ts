import assert from "node:assert/strict";
import { test } from "node:test";
import { change, compare } from "../src/store";

test("both runs of a comparison send one request, whatever changes meanwhile", async () => {
  const sent: Record<string, any>[] = [];
  Object.assign(globalThis, {
    requestAnimationFrame: (draw: () => void) => draw(),
    fetch: async (_path: string, init: RequestInit) => {
      sent.push(JSON.parse(String(init.body)));
      change({ messages: [{ role: "user", content: "edited" }], temperature: "1" });
      return new Response("data: [DONE]\n\n");
    },
  });
  change({ messages: [{ role: "user", content: "first" }] });
  await compare();
  const [off, auto] = sent.map(({ messages, temperature, seed }) => ({ messages, temperature, seed }));
  assert.deepEqual(sent.map(({ speculation }) => speculation.mode), ["off", "auto"]);
  assert.deepEqual(auto, off);
  assert.equal(off!.messages[0].content, "first");
});
