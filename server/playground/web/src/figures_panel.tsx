import type { ComponentChildren } from "preact";
import { type Bar, Bars, Lines } from "./charts";
import { ms, percent } from "./figures";
import { Panel } from "./panel";
import { acceptance, type Run, type Step } from "./run";
import { compared, history, live, select, selected, show, shown } from "./store";

const SLOTS = 160;

export function FiguresPanel() {
  const run = live(shown.value);
  return (
    <Panel name="figures" title="Figures" folds>
      {run ? <Filled run={run} /> : <p class="empty">Times and acceptance appear here as tokens arrive.</p>}
    </Panel>
  );
}

function Filled({ run }: { run: Run }) {
  const { drafted, accepted } = acceptance(live(run).steps);
  const cut = run.steps.length > SLOTS ? `; last ${SLOTS} steps` : "";
  const { off, auto } = compared.value ?? {};
  const lines = (off && auto ? [off, auto] : [run]).map(({ stepTokenMs, mode }) => ({ values: stepTokenMs, look: mode }));
  return (
    <>
      <Chart title="Time to first token" value={ms(run.firstMs)} note="by run">
        <Bars bars={runBars()} slots={12} label={`Time to first token of the last runs; now ${ms(run.firstMs)}`} format={ms} />
      </Chart>
      <Chart title="Time per token" value={ms(run.perTokenMs)} note={auto ? "by step; dashed: off" : "by step"}>
        <Lines lines={lines} label={`Time per token at each step; ${ms(run.perTokenMs)} on average`} format={ms} />
      </Chart>
      <Chart title="Time per step" value={ms(meanStep(run))} note={`draft + verify${cut}`}>
        <Bars bars={stepBars(run, times)} slots={SLOTS} label="Milliseconds of each step, drafting and verifying" format={ms} />
        <Keys names={["draft", "verify"]} />
      </Chart>
      <Chart title="Acceptance" value={percent(accepted, drafted)} note={`${(run.perStep ?? 0).toFixed(2)} tokens per step${cut}`}>
        <Bars
          bars={stepBars(run, drafts)}
          slots={SLOTS}
          label={`Draft tokens of each step: ${accepted} of ${drafted} accepted`}
          format={(value) => String(value)}
        />
        <Keys names={["accepted", "rejected"]} />
      </Chart>
    </>
  );
}

function Chart(props: { title: string; value: string; note: string; children: ComponentChildren }) {
  return (
    <figure class="chart">
      <figcaption>
        <span>{props.title}</span> <small>{props.note}</small> <b>{props.value}</b>
      </figcaption>
      {props.children}
    </figure>
  );
}

function Keys({ names }: { names: string[] }) {
  return (
    <p class="keys" aria-hidden="true">
      {names.map((name) => (
        <span key={name}>
          <i class={name} />
          {name}
        </span>
      ))}
    </p>
  );
}

function runBars(): Bar[] {
  return history.value
    .filter((run) => run.firstMs !== null)
    .map((run) => ({
      parts: [{ value: run.firstMs!, look: run.mode === "off" ? "hollow" : "full" }],
      title: `Run ${run.number}, ${run.mode}: ${ms(run.firstMs)} to the first token, ${ms(run.perTokenMs)} per token`,
      chosen: run === shown.value,
      onPick: () => show(run),
    }));
}

/** A bar for each step, which selects it. */
function stepBars(run: Run, drawn: (step: Step) => Bar): Bar[] {
  const chosen = selected.value === null ? undefined : run.tokens[selected.value]?.step;
  return run.steps.map((step) => ({
    ...drawn(step),
    chosen: step.index === chosen,
    onPick: () => select(run, step.tokens[0]!.index),
  }));
}

function times({ index, tree }: Step): Bar {
  return {
    parts: [
      { value: tree?.draft_ms ?? 0, look: "draft" },
      { value: tree?.verify_ms ?? 0, look: "verify" },
    ],
    title: `Step ${index + 1}: draft ${ms(tree?.draft_ms)}, verify ${ms(tree?.verify_ms)}`,
  };
}

function drafts(step: Step): Bar {
  const { drafted, accepted } = acceptance([step]);
  return {
    parts: [
      { value: accepted, look: "accepted" },
      { value: drafted - accepted, look: "rejected" },
    ],
    title: `Step ${step.index + 1}: ${accepted} of ${drafted} drafted accepted`,
  };
}

function meanStep(run: Run): number | null {
  const times = run.steps.flatMap(({ tree }) => (tree ? [tree.draft_ms + tree.verify_ms] : []));
  return times.length ? times.reduce((sum, time) => sum + time, 0) / times.length : null;
}
