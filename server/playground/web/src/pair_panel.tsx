import { count, ms } from "./figures";
import { firstDifference, type Run } from "./run";
import { live, pair, show, shown } from "./store";

/** The times of speculation off and auto, once both are done. */
export function PairPanel() {
  const { off, auto } = live(pair.value) ?? {};
  if (off?.state !== "done" || auto?.state !== "done") return null;
  const difference = firstDifference(off, auto);
  const same = difference === null;
  const longest = Math.max(off.lastMs, auto.lastMs);
  return (
    <section class="panel pair" aria-labelledby="pair-title">
      <div class="title">
        <h2 id="pair-title">Off / auto</h2>
        <p class={`verdict ${same ? "good" : "bad"}`}>
          {same ? `✓ The same ${count(off.tokens, "token")}` : `✕ They differ from token ${difference + 1} on`}
          {same && `, ${ratio(off, auto)}`}
        </p>
      </div>
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th scope="col">Speculation</th>
              <th scope="col">First token</th>
              <th scope="col">Per token</th>
              <th scope="col">Whole</th>
              <th scope="col">Steps</th>
              <th scope="col">
                <span class="sr">Show</span>
              </th>
            </tr>
          </thead>
          <tbody>
            {[off, auto].map((run) => (
              <tr key={run.number}>
                <th scope="row">{run.mode}</th>
                <td>{ms(run.firstMs)}</td>
                <td>{ms(run.perTokenMs)}</td>
                <td class="whole">
                  <svg viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">
                    <rect class={run.mode === "off" ? "hollow" : "full"} width={(100 * run.lastMs) / longest} height="4" />
                  </svg>
                  {ms(run.lastMs)}
                </td>
                <td>{run.ledger.steps.length}</td>
                <td>
                  <button type="button" class="quiet" aria-pressed={shown.value === run} onClick={() => show(run)}>
                    Show
                  </button>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function ratio(off: Run, auto: Run): string {
  const [slow, fast] = [off.perTokenMs, auto.perTokenMs];
  if (slow === null || fast === null || !(fast > 0)) return "too short to measure";
  const found = slow / fast;
  return found >= 1 ? `${found.toFixed(2)}× as fast per token` : `${(1 / found).toFixed(2)}× as slow per token`;
}
