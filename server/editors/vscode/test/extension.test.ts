import assert from "node:assert/strict";
import { test } from "node:test";
import { activate, deactivate } from "../src/extension.js";
import { State, clients } from "./fake_client.js";
import { bars, commands, configured } from "./fake_vscode.js";

const turn = () => new Promise(setImmediate);
const states = () => clients.map((client) => client.state);

const remembered = new Map<string, unknown>(); // of all windows
const globalState = {
  get: (name: string, other: unknown) => remembered.get(name) ?? other,
  update: async (name: string, value: unknown) => void remembered.set(name, value),
};

async function active() {
  clients.length = 0;
  void activate({ subscriptions: [], globalState } as never);
  await turn();
}

function restart() {
  void commands.run("specdec.restart");
  return turn();
}

test("a server that still starts is stopped once it has started", async () => {
  await active();
  await restart();
  assert.deepEqual(states(), [State.Starting]);
  clients[0]?.ready();
  await turn();
  await turn();
  assert.deepEqual(states(), [State.Stopped, State.Starting]);
  clients[1]?.ready();
  await deactivate();
  assert.deepEqual(states(), [State.Stopped, State.Stopped]);
});

test("a process that starts again gets the settings of that moment", async () => {
  await active();
  configured.mode = "off";
  assert.deepEqual(clients[0]?.options.initializationOptions(), { mode: "off" });
  delete configured.mode;
  clients[0]?.ready();
  await deactivate();
});

test("switched on again, suggestions come as they did before", async () => {
  await active();
  for (const mode of ["auto", "manual"]) {
    configured.mode = mode;
    await commands.run("specdec.toggle");
    assert.equal(configured.mode, "off");
    await commands.run("specdec.toggle");
    assert.equal(configured.mode, mode);
  }
  delete configured.mode;
  clients[0]?.ready();
  await deactivate();
});

test("how suggestions came before holds for every window", async () => {
  await active();
  configured.mode = "auto";
  await commands.run("specdec.toggle");
  await globalState.update("modeWhenOn", "manual"); // by another window
  await commands.run("specdec.toggle");
  assert.equal(configured.mode, "manual");
  delete configured.mode;
  clients[0]?.ready();
  await deactivate();
});

test("restarts at the same time leave one server", async () => {
  await active();
  clients[0]?.ready();
  const restarts = [restart(), restart()];
  for (let i = 0; i < 5; i++) {
    await turn();
    clients.at(-1)?.ready();
  }
  await Promise.all(restarts);
  assert.deepEqual(states(), [State.Stopped, State.Stopped, State.Running]);
  await deactivate();
});

test("the status bar says that the server has ended, unless it is replaced", async () => {
  await active();
  const bar = bars.at(-1);
  clients[0]?.ready();
  await restart();
  await turn();
  clients[0]?.crash();
  assert.equal(clients.length, 2);
  assert.doesNotMatch(String(bar?.tooltip), /has ended/);
  clients[1]?.ready();
  clients[1]?.crash();
  assert.match(String(bar?.tooltip), /the language server has ended/);
  await deactivate();
});

test("a server that hangs while it starts is disposed of after a while", async ({ mock }) => {
  mock.timers.enable({ apis: ["setTimeout"] });
  await active();
  await restart();
  mock.timers.tick(9_000);
  await turn();
  assert.deepEqual(clients.map((client) => client.disposed), [false]);
  mock.timers.tick(2_000);
  await turn();
  assert.deepEqual(clients.map((client) => client.disposed), [true, false]);
});
