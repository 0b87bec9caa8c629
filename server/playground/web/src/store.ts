// The playground's state and actions.
import { batch, computed, signal } from "@preact/signals";
import { ApiError, getJson, messageOf, statusOf, stream } from "./api";
import { emptyForm, faultOf, type Form, requestOf } from "./request";
import { bestStep, type Mode, Run } from "./run";
import type { Info, StepTrace } from "./wire";

export type Connection = "connecting" | "ready" | "loading" | "lost" | "key";

/** What was asked for at the start; the form and the model may change while it runs. */
interface Asked {
  form: Form;
  model: string;
}

const HISTORY = 24;
const TRACE_STEPS = 60;
const DRAW_MS = 100;
const ROUND_MS = 700;
const CALM_ROUNDS = 8; // between polls of a ready server
const EAGER_ROUNDS = 3; // and of one that is not

export const form = signal<Form>(emptyForm());
export const apiKey = signal("");
export const info = signal<Info | null>(null);
export const connection = signal<Connection>("connecting");
export const shown = signal<Run | null>(null);
export const history = signal<Run[]>([]);
/** Whether requests need a key. */
export const locked = computed(() => connection.value === "key" || apiKey.value !== "");
/** Two runs of one request. `auto` runs after `off`, so that they do not compete for the processor. */
const pair = signal<{ off: Run; auto: Run | null } | null>(null);
/** The comparison that the shown run is part of. */
export const compared = computed(() => {
  const found = pair.value;
  return found && (shown.value === found.off || shown.value === found.auto) ? found : null;
});
/** The index of the selected token of the shown run. */
export const selected = signal<number | null>(null);
export const busy = signal(false);
/** `lost`: a later good answer of the server clears it. */
export const notice = signal<{ message: string; field: string; lost?: boolean } | null>(null);
export const trace = signal<StepTrace[]>([]);
export const traceError = signal("");
/** Increases when runs, which change in place, have new data. */
const tick = signal(0);

/** The index of the token whose step is shown: the selected one, else the last drafted one of the best step. */
export const looked = computed<number | null>(() => {
  const run = live(shown.value);
  if (!run?.tokens.length) return null;
  if (selected.value !== null) return selected.value;
  const step = bestStep(run.steps);
  const token = step?.tokens.at(step.tree?.accepted.length ? step.tree.accepted.length - 1 : -1);
  return token?.index ?? null;
});

let stopper: AbortController | null = null;
let drawing: ReturnType<typeof setTimeout> | undefined;
let runs = 0;

/** Returns `thing`, and makes the component render again when runs have new data. */
export function live<T>(thing: T): T {
  void tick.value;
  return thing;
}

/** Change the form; a notice about it is out of date. */
export function change(part: Partial<Form>): void {
  if (notice.value?.field) notice.value = null;
  form.value = { ...form.value, ...part };
}

/** Select a token, and show its run and step. */
export function select(run: Run, token: number): void {
  if (!run.tokens.length) return;
  batch(() => {
    shown.value = run;
    selected.value = Math.max(0, Math.min(run.tokens.length - 1, token));
  });
}

export function show(run: Run): void {
  batch(() => {
    shown.value = run;
    selected.value = null;
  });
}

/** Draw new data of runs soon. On the server's machine each redraw takes processor time from the engine. */
function refresh(): void {
  drawing ||= setTimeout(() => {
    drawing = undefined;
    tick.value++;
  }, DRAW_MS);
}

/** Run the form's request once, in its mode. */
export async function generate(): Promise<void> {
  await working((asked) => runOnce(asked, ""));
}

/** Run it with speculation off, then auto, with one seed and separate caches. */
export async function compare(): Promise<void> {
  await working(async (given) => {
    const seed = given.form.seed || String(crypto.getRandomValues(new Uint32Array(1))[0]);
    const asked = (mode: Mode): Asked => ({ ...given, form: { ...given.form, mode, seed } });
    const salt = () => `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    const off = await runOnce(asked("off"), salt(), (run) => (pair.value = { off: run, auto: null }));
    if (off.state === "done") await runOnce(asked("auto"), salt(), (run) => (pair.value = { off, auto: run }));
    else pair.value = null;
  });
}

export function stop(): void {
  stopper?.abort();
}

async function working(work: (asked: Asked) => Promise<unknown>): Promise<void> {
  if (busy.value) return;
  notice.value = faultOf(form.value);
  if (notice.value) return;
  stopper = new AbortController();
  busy.value = true;
  try {
    await work({ form: form.value, model: chosen() });
  } finally {
    busy.value = false;
    stopper = null;
    void readTrace();
  }
}

async function runOnce(asked: Asked, salt: string, begun: (run: Run) => void = () => {}): Promise<Run> {
  const run = new Run(++runs, asked.form.mode);
  const signal = stopper!.signal;
  batch(() => {
    history.value = [...history.value, run].slice(-HISTORY);
    begun(run);
    show(run);
  });
  const { path, body } = requestOf(asked.form, salt, asked.model);
  const began = performance.now();
  try {
    for await (const chunk of stream(path, body, apiKey.value, signal)) {
      run.add(chunk, performance.now() - began);
      refresh();
    }
    run.state = "done";
  } catch (error) {
    fail(run, error, signal.aborted);
  }
  tick.value++;
  return run;
}

function fail(run: Run, error: unknown, stopped: boolean): void {
  run.state = stopped ? "stopped" : "failed";
  if (stopped) return;
  const status = statusOf(error);
  notice.value = { message: messageOf(error), field: error instanceof ApiError ? error.field : "", lost: status === 0 };
  if (status === 401) connection.value = "key";
  if (status <= 0) void look();
}

/** Query the server's state and model. */
export async function look(): Promise<void> {
  try {
    await getJson(`/readyz${asking("?")}`, apiKey.value);
    const asked = chosen();
    const found = await getJson<Info>(`/page/info${asking("?")}`, apiKey.value);
    if (chosen() === asked) info.value = found;
    connection.value = "ready";
    if (notice.value?.lost) notice.value = null;
  } catch (error) {
    const status = statusOf(error);
    if (status === 404 && chosen()) {
      info.value = null; // the server has restarted without the chosen model
      change({ drafters: null });
      return look();
    }
    connection.value = status === 401 ? "key" : status === 0 ? "lost" : "loading";
  }
}

/** Use this model from now on. */
export async function choose(model: string): Promise<void> {
  batch(() => {
    info.value = { ...info.value!, model };
    change({ drafters: null });
  });
  await look();
  await readTrace();
}

/** The form's request as a command line. */
export function asCurl(): string {
  const { path, body } = requestOf(form.value, "", chosen());
  const quoted = (text: string) => `'${text.replace(/'/g, "'\\''")}'`;
  const key = apiKey.value ? ` -H "Authorization: Bearer $SPECDEC_KEY"` : "";
  return `curl -N ${location.origin}${path}${key} -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(body))}`;
}

/** The chosen model's name; empty on a server of one. */
function chosen(): string {
  return info.value && info.value.models.length > 1 ? info.value.model : "";
}

function asking(sign: "?" | "&"): string {
  return chosen() && `${sign}model=${encodeURIComponent(chosen())}`;
}

/** The address of a running experiment's report. */
export function reportOf(experiment: string): string {
  return `/v1/experiments/${experiment}/report${asking("?")}`;
}

export async function readTrace(): Promise<void> {
  if (connection.value !== "ready") return;
  try {
    trace.value = await getJson<StepTrace[]>(`/trace?limit=${TRACE_STEPS}${asking("&")}`, apiKey.value);
    traceError.value = "";
  } catch (error) {
    // The header reports a lost connection.
    traceError.value = statusOf(error) === 0 ? "" : messageOf(error);
  }
}

/** Poll the server while the tab is visible, more often while a request runs. */
export async function watch(): Promise<never> {
  for (let round = 0; ; round++) {
    if (!document.hidden) {
      const due = round % (connection.value === "ready" ? CALM_ROUNDS : EAGER_ROUNDS) === 0;
      if (due) await look();
      if (due || busy.value) await readTrace();
    }
    await new Promise((done) => setTimeout(done, ROUND_MS));
  }
}
