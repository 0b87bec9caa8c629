import { useState } from "preact/hooks";
import { look } from "./figures";
import { Bars } from "./charts";
import { Panel } from "./panel";
import { trace, traceError } from "./store";
import type { StepTrace } from "./wire";

const ROWS = 40;
const WORDS: Record<string, string> = {
  free: "A lookup in known text: it costs a fraction of a millisecond, so it always proposes",
  on: "It proposes: the expected tokens are worth its time",
  off: "It does not propose: the expected tokens are not worth its time",
  probe: "It proposes a little, so that the controller learns whether it pays",
  forced: "It proposes whatever it costs: the request's speculation is on",
  read: "It reads a part of a long prompt, and proposes in a later step",
  "no draft": "Nothing was proposed: the target produced one token per request",
};

/** The controller's prediction for each step, and the outcome. */
export function TracePanel() {
  const [frozen, freeze] = useState<StepTrace[] | null>(null);
  const steps = frozen ?? trace.value;
  const latest = [...steps].reverse().slice(0, ROWS);
  const button = steps.length > 0 && (
    <button type="button" class="quiet" aria-pressed={frozen !== null} onClick={() => freeze(frozen ? null : trace.value)}>
      {frozen ? "Frozen" : "Freeze"}
    </button>
  );
  return (
    <Panel name="trace" title="Controller" aside={button} folds>
      {traceError.value && <p class="empty">The trace cannot be read: {traceError.value}</p>}
      {!steps.length && !traceError.value && <p class="empty">The engine has made no step yet.</p>}
      {steps.length > 0 && (
        <>
          <figure class="chart">
            <figcaption>
              <span>Tokens per step</span> <small>all requests together</small>
            </figcaption>
            <Bars
              slots={60}
              label="Tokens of the engine's last steps"
              format={(value) => String(value)}
              bars={steps.map((step) => ({
                parts: [{ value: step.realised_tokens, look: "full" }],
                title: `Step ${step.step}: ${step.realised_tokens} tokens, ${fixed(step.predicted_tokens)} expected`,
              }))}
            />
          </figure>
          <div class="scroll" tabIndex={0} role="region" aria-label="The engine's last steps, newest first">
            <Table steps={latest} />
          </div>
        </>
      )}
    </Panel>
  );
}

function Table({ steps }: { steps: StepTrace[] }) {
  return (
    <table>
      <thead>
        <tr>
          <th scope="col">Step</th>
          <th scope="col" title="Draft nodes verified, of those proposed">
            Nodes <small>of proposed</small>
          </th>
          <th scope="col" title="Tokens, and the prediction">
            Tokens <small>/ expected</small>
          </th>
          <th scope="col" title="Milliseconds of drafting and verifying, and the prediction">
            ms <small>/ expected</small>
          </th>
        </tr>
      </thead>
      {steps.map((step) => (
        <tbody key={step.step}>
          <tr>
            <td>{step.step}</td>
            <td>
              {step.budget}
              <small> of {step.candidates}</small>
            </td>
            <td>
              {step.realised_tokens}
              <small> / {fixed(step.predicted_tokens)}</small>
            </td>
            <td>
              {fixed(sum(step.realised_draft_ms, step.realised_verify_ms))}
              <small> / {fixed(sum(step.predicted_draft_ms, step.predicted_verify_ms))}</small>
            </td>
          </tr>
          <tr>
            <td colSpan={4}>
              <Decisions step={step} />
            </td>
          </tr>
        </tbody>
      ))}
    </table>
  );
}

/** Decision and outcome of each drafter; free ones without a proposal are omitted. */
function Decisions({ step }: { step: StepTrace }) {
  const active = step.drafters.filter((drafter) => drafter.decision !== "free" || drafter.proposed > 0);
  if (!active.length) return <small>{explained("no draft")}</small>;
  return (
    <>
      {active.map((drafter) => (
        <span key={drafter.name} class={`chip ${drafter.decision === "off" ? "off" : ""}`}>
          <span class={`mark-as ${look(drafter.name)}`}>{drafter.name}</span> {explained(drafter.decision)}
          {drafter.verified > 0 && ` · ${drafter.accepted} of ${drafter.verified} accepted`}
          {drafter.read > 0 && ` · ${drafter.read} read`}
        </span>
      ))}
    </>
  );
}

function explained(word: string) {
  return <abbr title={WORDS[word]}>{word}</abbr>;
}

function sum(a: number | null, b: number | null): number | null {
  return a === null || b === null ? null : a + b;
}

function fixed(value: number | null): string {
  return value === null ? "–" : value.toFixed(1);
}
