import { count, ms } from "./figures";
import { firstDifference, type Run } from "./run";
import { Panel } from "./panel";
import { compared, live, show, shown } from "./store";

/** The times of speculation off and auto, once both are done. */
export function PairPanel() {
  const { off, auto } = live(compared.value) ?? {};
  if (off?.state !== "done" || auto?.state !== "done") return null;
  const difference = firstDifference(off, auto);
  const same = difference === null;
  const longest = Math.max(off.lastMs, auto.lastMs);
  const [fast, words] = speed(off, auto);
  const verdict = (
    <p class={`verdict ${!same ? "bad" : fast ? "good" : ""}`}>
      {same ? `✓ The same ${count(off.tokens, "token")}, ${words}` : `✕ They differ from token ${difference + 1} on`}
    </p>
  );
  return (
    <Panel name="pair" title="Off / auto" aside={verdict}>
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th scope="col">Speculation</th>
              <th scope="col">First token</th>
              <th scope="col">Per token</th>
              <th scope="col">Whole</th>
              <th scope="col">Steps</th>
            </tr>
          </thead>
          <tbody>
            {[off, auto].map((run) => (
              <tr key={run.number}>
                <th scope="row">
                  <button type="button" class="quiet" aria-pressed={shown.value === run} onClick={() => show(run)} title="Show its steps and figures">
                    {run.mode}
                  </button>
                </th>
                <td>{ms(run.firstMs)}</td>
                <td>{ms(run.perTokenMs)}</td>
                <td class="whole">
                  <svg viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">
                    <rect class={run.mode === "off" ? "hollow" : "full"} width={(100 * run.lastMs) / longest} height="4" />
                  </svg>
                  {ms(run.lastMs)}
                </td>
                <td>{run.ledger.steps.length}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

/** Whether auto is faster, and by how much. */
function speed(off: Run, auto: Run): [boolean, string] {
  const [slow, fast] = [off.perTokenMs, auto.perTokenMs];
  if (slow === null || fast === null || !(fast > 0)) return [false, "too short to measure"];
  const found = slow / fast;
  return found >= 1 ? [true, `${found.toFixed(2)}× as fast per token`] : [false, `${(1 / found).toFixed(2)}× as slow per token`];
}
