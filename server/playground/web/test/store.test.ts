import assert from "node:assert/strict";
import { test } from "node:test";
import { effect } from "@preact/signals";
import {
  change, choose, compare, compared, connection, generate, history, info, live, look, notice, reportOf, show, stop,
} from "../src/store";
import type { Info } from "../src/wire";

test("both runs of a comparison send one request, whatever changes meanwhile", async () => {
  const sent: Record<string, any>[] = [];
  Object.assign(globalThis, {
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

test("a comparison is shown with its own runs only", async () => {
  Object.assign(globalThis, {
    fetch: async () => new Response("data: [DONE]\n\n"),
  });
  await generate();
  await compare();
  const [alone, off, auto] = history.value.slice(-3);
  assert.deepEqual(compared.value, { off, auto });
  show(alone!);
  assert.equal(compared.value, null);
  show(off!);
  assert.deepEqual(compared.value, { off, auto });
});

test("a comparison whose first run is stopped promises no second one", async () => {
  let asked = 0;
  Object.assign(globalThis, {
    fetch: async (_path: string, { signal }: RequestInit) => {
      asked++;
      stop();
      signal?.throwIfAborted();
    },
  });
  await compare();
  assert.equal(asked, 1);
  assert.equal(history.value.at(-1)?.state, "stopped");
  assert.equal(compared.value, null);
});

test("an answer is drawn a few times a second, however fast it arrives", async (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  let sent = 0;
  const pull = async (stream: ReadableStreamDefaultController) => {
    await new Promise((done) => setImmediate(done));
    const data = sent++ < 40 ? JSON.stringify({ choices: [{ text: "a", token_ids: [sent] }] }) : "[DONE]";
    stream.enqueue(new TextEncoder().encode(`data: ${data}\n\n`));
  };
  Object.assign(globalThis, {
    fetch: async () => new Response(new ReadableStream({ pull })),
  });
  let drawn = 0;
  const end = effect(() => {
    live(null);
    drawn++;
  });
  await generate();
  end();
  context.mock.timers.runAll();
  assert.equal(history.value.at(-1)?.text, "a".repeat(40));
  assert.equal(drawn, 2, "before it and after it: no time passes here");
});

test("the state shown is that of the chosen model", async () => {
  const asked: string[] = [];
  Object.assign(globalThis, { fetch: async (path: string) => (asked.push(path), Response.json([])) });
  info.value = { model: "a b", models: ["a b", "c"] } as unknown as Info;
  await look();
  assert.equal(asked[0], "/readyz?model=a%20b");
  info.value = null;
});

test("the cause of a failure stays in sight while the server answers", async () => {
  Object.assign(globalThis, {
    fetch: async (_path: string, init: RequestInit) => (init.method ? new Response("") : Response.json([])),
  });
  change({ messages: [{ role: "user", content: "first" }] });
  await generate();
  await look();
  assert.equal(notice.value?.message, "The answer is incomplete.");
  notice.value = info.value = null;
});

test("the report of an experiment is that of the chosen model", () => {
  for (const [models, path] of [
    [["a/b c"], "/v1/experiments/widths/report"],
    [["a/b c", "d"], "/v1/experiments/widths/report?model=a%2Fb%20c"],
  ] as const) {
    info.value = { model: "a/b c", models } as unknown as Info;
    assert.equal(reportOf("widths"), path);
  }
  info.value = null;
});

test("a server that restarts without the chosen model is shown with its default one", async () => {
  let served = ["a", "b"];
  let ready = true;
  Object.assign(globalThis, {
    fetch: async (path: string) => {
      const model = new URL(path, "http://server").searchParams.get("model") ?? served[0]!;
      if (!ready) throw new TypeError("refused");
      if (path.startsWith("/page/info")) {
        return served.includes(model) ? Response.json({ model, models: served }) : new Response("{}", { status: 404 });
      }
      return Response.json([]);
    },
  });
  await look();
  await choose("b");
  assert.equal(info.value?.model, "b");
  ready = false;
  await look();
  assert.equal(connection.value, "lost");
  [ready, served] = [true, ["a", "c"]];
  await look();
  assert.deepEqual([connection.value, info.value?.model], ["ready", "a"]);
  served = ["d"]; // it has restarted between two looks
  await look();
  assert.deepEqual(info.value?.models, ["d"]);
  info.value = null;
});
