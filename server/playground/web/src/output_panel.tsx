import { useEffect, useMemo, useRef } from "preact/hooks";
import { count, look, ms, percent, proposedBy } from "./figures";
import { Copy, Panel } from "./panel";
import { countBySource, firstDifference, type Run, type Step, type Token } from "./run";
import { busy, compared, connection, live, select, selected, shown } from "./store";

/** The answer; both answers of a comparison. */
export function OutputPanel() {
  const run = live(shown.value);
  const pair = live(compared.value);
  return (
    <Panel name="output" title="Output" aside={pair ? <Verdict {...pair} /> : run && run.tokens.length > 0 && <Summary run={run} />}>
      {pair ? (
        <div class="sides">
          <Side run={pair.off} />
          <Side run={pair.auto} />
        </div>
      ) : (
        <Answer run={run} />
      )}
    </Panel>
  );
}

/** What a comparison has shown, once both runs are done. */
function Verdict({ off, auto }: { off: Run; auto: Run | null }) {
  if (off.state !== "done" || live(auto)?.state !== "done") return null;
  const difference = firstDifference(off, auto!);
  if (difference !== null) return <p class="verdict bad">✕ They differ from token {difference + 1} on</p>;
  const [fast, words] = speed(off, auto!);
  return (
    <p class={`verdict ${fast ? "good" : ""}`}>
      ✓ The same {count(off.tokens.length, "token")}, {words}
    </p>
  );
}

/** Whether auto is faster, and by how much. */
function speed(off: Run, auto: Run): [boolean, string] {
  const [slow, fast] = [off.perTokenMs, auto.perTokenMs];
  if (slow === null || fast === null || !(fast > 0)) return [false, "too short to measure"];
  const found = slow / fast;
  return found >= 1 ? [true, `${found.toFixed(2)}× as fast per token`] : [false, `${(1 / found).toFixed(2)}× as slow per token`];
}

function Side({ run }: { run: Run | null }) {
  live(run);
  if (!run) return <p class="empty">Auto runs next: in parallel, each run would slow the other.</p>;
  return (
    <div class="side-by">
      {run.tokens.length > 0 && <Summary run={run} />}
      <Answer run={run} />
    </div>
  );
}

function Answer({ run }: { run: Run | null }) {
  return run && live(run).tokens.length > 0 ? <Filled run={run} /> : <Empty run={run} />;
}

function Summary({ run }: { run: Run }) {
  live(run);
  return (
    <p class="summary">
      <span class="tag">{run.mode}</span>
      {count(run.tokens.length, "token")} · {count(run.steps.length, "step")} · first after {ms(run.firstMs)}, last after {ms(run.lastMs)} ·{" "}
      <b>{ms(run.perTokenMs)}</b> per token
      {run.state === "stopped" && <em> · stopped</em>}
      {run.state === "failed" && <em> · failed</em>}
      {run.finishReason === "length" && <em> · cut at max tokens</em>} <Copy label="Copy" text={() => run.text} />
    </p>
  );
}

function Empty({ run }: { run: Run | null }) {
  live(run);
  if (run?.state === "running") return <p class="empty">Waiting for the first token…</p>;
  if (run?.state === "failed") return <p class="empty">No tokens.</p>;
  if (run) return <p class="empty">{run.state === "stopped" ? "Stopped before the first token." : "The answer is empty."}</p>;
  if (connection.value === "key") return <p class="empty">This server requires an API key. Enter yours above.</p>;
  return (
    <p class="empty">
      Press <b>Generate</b>. Every token shows which drafter proposed it; select one by mouse or arrow keys to see the tree of
      its step.
    </p>
  );
}

function Filled({ run }: { run: Run }) {
  const box = useRef<HTMLDivElement>(null);
  const end = useRef(0);
  const chosen = run === shown.value ? selected.value : null;
  const { steps, tokens } = live(run);
  useEffect(() => {
    if (chosen !== null) document.getElementById(tokenId(run, chosen))?.scrollIntoView({ block: "nearest" });
  }, [chosen]);
  useEffect(() => {
    const { scrollTop, clientHeight, scrollHeight } = box.current!;
    // A reader who has scrolled up by a line, 23 pixels, stays there.
    if (chosen === null && busy.value && scrollTop + clientHeight > end.current - 23) box.current!.scrollTop = scrollHeight;
    end.current = scrollHeight;
  }, [tokens.length]);
  const click = (event: MouseEvent) => {
    const index = (event.target as HTMLElement).dataset.token;
    if (index !== undefined) select(run, Number(index));
  };
  return (
    <>
      <Legend tokens={tokens} />
      <div
        ref={box}
        class={`tokens${run.state === "running" ? " live" : ""}`}
        role="listbox"
        tabIndex={0}
        aria-label={`Generated tokens, speculation ${run.mode}. Arrow keys: left and right by token, up and down by step.`}
        aria-orientation="horizontal"
        aria-activedescendant={chosen === null ? undefined : tokenId(run, chosen)}
        onClick={click}
        onCopy={(event) => {
          event.preventDefault(); // the marks of line breaks are not part of the answer
          event.clipboardData?.setData("text/plain", String(getSelection()).replace(/↵(\n|$)/g, "\n"));
        }}
        onKeyDown={(event) => move(event, run, chosen)}
        onFocus={(event) => {
          if (chosen === null && (event.target as HTMLElement).matches(":focus-visible")) select(run, 0);
        }}
      >
        {steps.map((step) => (
          <StepTokens
            key={step.index}
            run={run}
            step={step}
            chosen={chosen !== null && tokens[chosen]?.step === step.index ? chosen : null}
          />
        ))}
      </div>
    </>
  );
}

/** The tokens of one step. They are drawn again only if their text or the selection changes. */
function StepTokens({ run, step, chosen }: { run: Run; step: Step; chosen: number | null }) {
  const text = step.tokens.map((token) => token.text).join("\0");
  const drawn = () => (
    <span class={chosen === null ? "step" : "step chosen"} role="presentation">
      {step.tokens.map((token) => (
        <span
          key={token.index}
          id={tokenId(run, token.index)}
          data-token={token.index}
          role="option"
          aria-selected={chosen === token.index}
          aria-label={describe(token)}
          title={describe(token)}
          class={`token ${look(token.sources[0])}`}
        >
          {shape(token.text)}
        </span>
      ))}
    </span>
  );
  return useMemo(drawn, [step, text, chosen]);
}

function Legend({ tokens }: { tokens: readonly Token[] }) {
  const counts = [...countBySource(live(tokens))].sort((a, b) => b[1] - a[1]);
  return (
    <ul class="legend" aria-label="Tokens by drafter">
      {counts.map(([name, number]) => (
        <li key={name}>
          <span class={`mark-as ${look(name)}`}>{name === "target" ? "target itself" : name}</span> {number}
          <small> {percent(number, tokens.length)}</small>
        </li>
      ))}
    </ul>
  );
}

function tokenId(run: Run, index: number): string {
  return `t${run.number}-${index}`;
}

/** It holds the text as it is shown: users of speech control choose a token by that. */
function describe(token: Token): string {
  return `“${shape(token.text)}”, ${proposedBy(token.sources)}, step ${token.step + 1}`;
}

/** A line break gets a visible mark, so that it can be selected. */
function shape(text: string): string {
  return text.replace(/\n/g, "↵\n");
}

function move(event: KeyboardEvent, run: Run, chosen: number | null): void {
  const { tokens, steps } = run;
  const at = chosen ?? -1;
  const step = tokens[at]?.step ?? -1;
  const next: Record<string, number | undefined> = {
    ArrowRight: at + 1,
    ArrowLeft: at - 1,
    ArrowDown: steps[Math.min(step + 1, steps.length - 1)]?.tokens[0]?.index,
    ArrowUp: steps[Math.max(step - 1, 0)]?.tokens[0]?.index,
    Home: 0,
    End: tokens.length - 1,
  };
  const goal = next[event.key];
  if (goal === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  select(run, goal);
}
