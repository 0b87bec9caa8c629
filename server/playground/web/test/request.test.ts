import assert from "node:assert/strict";
import { test } from "node:test";
import { niceCeiling } from "../src/figures";
import { emptyForm, EXAMPLES, faultOf, requestOf } from "../src/request";

test("the form that a visitor finds can be sent", () => {
  const form = emptyForm();
  assert.equal(faultOf(form), null);
  assert.equal(faultOf({ ...form, kind: "raw" }), null);
});

test("every example can be sent", () => {
  assert.deepEqual([...new Set(EXAMPLES.map(({ kind }) => kind))].sort(), ["chat", "fill", "raw"]);
  for (const { kind, fields, name } of EXAMPLES) assert.equal(faultOf({ ...emptyForm(), kind, ...fields }), null, name);
});

test("a gap is asked for by what stands around it", () => {
  const form = { ...emptyForm(), kind: "fill" as const, prefix: "a", suffix: "b" };
  const { path, body } = requestOf(form, "");
  assert.equal(path, "/v1/completions");
  const { prompt, suffix } = body as Record<string, unknown>;
  assert.deepEqual([prompt, suffix], ["a", "b"]);
  assert.equal(faultOf({ ...form, suffix: "" })?.field, "suffix");
});

test("a model is named where there is a choice", () => {
  const of = (model?: string) => (requestOf(emptyForm(), "", model).body as Record<string, unknown>).model;
  assert.deepEqual([of(), of(""), of("fim")], [undefined, undefined, "fim"]);
});

test("an invalid value is reported by its field", () => {
  const form = { ...emptyForm(), kind: "raw" as const };
  const field = (part: object) => faultOf({ ...form, ...part })?.field;
  assert.equal(field({ prompt: "" }), "prompt");
  assert.equal(field({ kind: "chat", messages: [{ role: "system", content: "x" }] }), "messages");
  assert.equal(field({ drafters: [] }), "drafters");
  assert.equal(field({ drafters: [], mode: "off" }), undefined);
  assert.equal(field({ maxTokens: "0" }), "maxTokens");
  assert.equal(field({ seed: "9007199254740993" }), "seed");
  assert.equal(field({ temperature: "hot" }), "temperature");
  assert.equal(field({ temperature: "-1" }), "temperature");
  assert.equal(field({ maxNodes: "1.5" }), "maxNodes");
});

test("a request has what the form says, and nothing that it leaves open", () => {
  const given = { prompt: "p", mode: "on" as const, drafters: ["suffix"], maxDepth: "3", seed: "", prediction: "q" };
  const { path, body } = requestOf({ ...emptyForm(), kind: "raw", ...given }, "");
  assert.equal(path, "/v1/completions");
  assert.deepEqual(body, {
    stream: true,
    return_step_trees: true,
    return_token_ids: true,
    max_tokens: 160,
    temperature: 0,
    speculation: { mode: "on", drafters: ["suffix"], max_depth: 3 },
    prediction: { type: "content", content: "q" },
    prompt: "p",
  });
});

test("a chat leaves empty messages out", () => {
  const messages = [{ role: "system" as const, content: "" }, { role: "user" as const, content: "hi" }];
  const { path, body } = requestOf({ ...emptyForm(), messages, seed: "5" }, "s");
  assert.equal(path, "/v1/chat/completions");
  const { messages: sent, seed, cache_salt } = body as Record<string, unknown>;
  assert.deepEqual([sent, seed, cache_salt], [[{ role: "user", content: "hi" }], 5, "s"]);
});

test("scales end at round numbers above their data", () => {
  for (const [value, top] of [[0, 1], [0.3, 0.5], [1, 1], [1.01, 2], [7, 10], [20, 20], [430, 500]] as const)
    assert.ok(Math.abs(niceCeiling(value) - top) < 1e-9, `${value}`);
});
