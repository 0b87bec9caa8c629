import { look as lookOf } from "./figures";
import type { ComponentChildren } from "preact";
import { Messages } from "./messages";
import { Copy, narrow } from "./panel";
import { EXAMPLES } from "./request";
import type { Mode } from "./run";
import { asCurl, busy, change, compare, connection, form, generate, info, notice, stop } from "./store";

const MODES: [Mode, string, string][] = [
  ["auto", "Auto", "The controller decides each step how much to draft"],
  ["off", "Off", "Plain decoding"],
  ["on", "On", "Always draft, up to the limits given"],
];

/** Run the form's request; on a phone, scroll to the output below. */
function run(work: () => Promise<void>): void {
  void work();
  if (!narrow.value || !busy.value) return;
  requestAnimationFrame(() => document.getElementById("output")?.scrollIntoView({ block: "start" }));
}

export function FormPanel() {
  const { kind, prediction, mode } = form.value;
  const fillsIn = info.value?.fills_in ?? true;
  const submit = (event: Event) => {
    event.preventDefault();
    run(generate);
  };
  const quick = (event: KeyboardEvent) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
  };
  return (
    <form class="panel request" onSubmit={submit} onKeyDown={quick} aria-label="Request" noValidate>
      <Segments
        legend="Kind of request"
        name="kind"
        value={kind}
        options={[
          ["chat", "Chat", "Messages, through the model's chat template"],
          ["raw", "Completion", "Text that is continued as it is"],
          ["fill", "Fill in", "What is missing between two texts, as an editor asks for it"],
        ]}
        onPick={(value) => change({ kind: value })}
      />
      <Examples />
      {kind === "chat" && <Messages />}
      {kind === "raw" && <Text label="Prompt" name="prompt" rows={9} />}
      {kind === "fill" && (
        <>
          {!fillsIn && <p class="hint">This model was not trained to fill in: it will refuse. A coder model can.</p>}
          <Text label="Before the gap" name="prefix" rows={6} />
          <Text label="After the gap" name="suffix" rows={6} />
        </>
      )}
      <details class="settings" open={!narrow.value}>
        <summary>Settings</summary>
        <details>
          <summary>Predicted output{prediction && <em> set</em>}</summary>
          <Text label="Text that the answer is likely to repeat, used as a draft" name="prediction" rows={4} />
        </details>
        <Segments legend="Speculation" name="mode" value={mode} options={MODES} shown onPick={(value) => change({ mode: value })} />
        <Drafters off={mode === "off"} />
        <div class="fields">
          <Field label="Max nodes" name="maxNodes" placeholder="auto" disabled={mode === "off"} />
          <Field label="Max depth" name="maxDepth" placeholder="auto" disabled={mode === "off"} />
          <Field label="Temperature" name="temperature" />
          <Field label="Seed" name="seed" placeholder="random" />
          <Field label="Max tokens" name="maxTokens" />
        </div>
      </details>
      <Actions />
    </form>
  );
}

/** A select that only fills in the form, and keeps no value. */
function Examples() {
  const { kind } = form.value;
  const pick = (event: Event & { currentTarget: HTMLSelectElement }) => {
    const example = EXAMPLES.find(({ name }) => name === event.currentTarget.value);
    if (example) change(example.fields);
    event.currentTarget.value = "";
  };
  return (
    <label class="labelled">
      <span class="sr">Example</span>
      <select name="example" value="" onChange={pick}>
        <option value="">Examples…</option>
        {EXAMPLES.filter((example) => example.kind === kind).map(({ name }) => (
          <option key={name}>{name}</option>
        ))}
      </select>
    </label>
  );
}

function Actions() {
  const ready = connection.value === "ready";
  return (
    <div class="actions">
      {busy.value ? (
        <button type="button" class="stop" onClick={stop}>
          Stop <kbd>Esc</kbd>
        </button>
      ) : (
        <button type="submit" class="primary" disabled={!ready}>
          Generate <kbd>Ctrl ↵</kbd>
        </button>
      )}
      <button
        type="button"
        onClick={() => run(compare)}
        disabled={busy.value || !ready}
        title="Off and auto side by side, one after the other, with the same seed"
      >
        A/B <span class="more">off | auto</span>
      </button>
      <Copy label="Copy as curl" text={asCurl} />
    </div>
  );
}

function Drafters({ off }: { off: boolean }) {
  const loaded = info.value?.drafters ?? [];
  const chosen = form.value.drafters ?? loaded;
  if (!loaded.length) return info.value ? <p class="hint">No drafter is loaded.</p> : null;
  const flip = (name: string) => {
    const next = loaded.filter((other) => (other === name ? !chosen.includes(name) : chosen.includes(other)));
    change({ drafters: next.length === loaded.length ? null : next });
  };
  return (
    <fieldset class="drafters" disabled={off}>
      <legend>Drafters</legend>
      {loaded.map((name) => (
        <label key={name}>
          <input type="checkbox" checked={chosen.includes(name)} onChange={() => flip(name)} />
          <span class={`mark-as ${lookOf(name)}`}>{name}</span>
        </label>
      ))}
    </fieldset>
  );
}

interface SegmentsProps<T extends string> {
  legend: string;
  name: string;
  value: T;
  options: readonly (readonly [T, string, string])[];
  shown?: boolean;
  onPick: (value: T) => void;
}

function Segments<T extends string>({ legend, name, value, options, shown, onPick }: SegmentsProps<T>) {
  return (
    <fieldset class="segments">
      <legend class={shown ? "" : "sr"}>{legend}</legend>
      <div>
        {options.map(([option, label, title]) => (
          <label key={option} title={title}>
            <input type="radio" name={name} value={option} checked={value === option} onChange={() => onPick(option)} />
            <span>{label}</span>
          </label>
        ))}
      </div>
    </fieldset>
  );
}

type TextName = "prompt" | "prefix" | "suffix" | "prediction";
function Text({ label, name, rows }: { label: string; name: TextName; rows: number }) {
  return (
    <Labelled label={label}>
      <textarea
        name={name}
        rows={rows}
        spellcheck={false}
        aria-invalid={notice.value?.field === name}
        value={form.value[name]}
        onInput={(event) => change({ [name]: event.currentTarget.value })}
      />
    </Labelled>
  );
}

type FieldName = "maxNodes" | "maxDepth" | "temperature" | "seed" | "maxTokens";
const WIRE: Record<FieldName, string> = {
  maxNodes: "speculation.max_nodes",
  maxDepth: "speculation.max_depth",
  temperature: "temperature",
  seed: "seed",
  maxTokens: "max_tokens",
};

function Field({ label, name, ...more }: { label: string; name: FieldName; placeholder?: string; disabled?: boolean }) {
  const fault = notice.value?.field;
  return (
    <Labelled label={label}>
      <input
        name={name}
        inputMode="decimal"
        autocomplete="off"
        aria-invalid={fault === name || fault === WIRE[name]}
        value={form.value[name]}
        onInput={(event) => change({ [name]: event.currentTarget.value.trim() })}
        {...more}
      />
    </Labelled>
  );
}

function Labelled({ label, children }: { label: string; children: ComponentChildren }) {
  return (
    <label class="labelled">
      <span>{label}</span>
      {children}
    </label>
  );
}
