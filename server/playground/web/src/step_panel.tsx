import { count, look, ms, percent, proposedBy, visible } from "./figures";
import type { Step } from "./ledger";
import { live, looked, shown } from "./store";
import { TreeView } from "./tree_view";
import type { StepTree } from "./wire";

/** The step of the selected token. */
export function StepPanel() {
  const choice = looked.value;
  const run = live(shown.value);
  if (!run?.tokens) return null;
  const token = choice?.run === run ? run.ledger.tokens[choice.token] : undefined;
  const step = token && run.ledger.steps[token.step];
  const best = choice?.best && (step?.tokens.length ?? 0) > 1;
  return (
    <section class="panel step-panel" aria-labelledby="step-title">
      <div class="title">
        <h2 id="step-title">
          {step ? `${best ? "The best step: " : ""}Step ${step.index + 1} of ${run.ledger.steps.length}` : "Step"}
        </h2>
        {step?.tree && <StepSummary step={step} tree={step.tree} />}
      </div>
      {!step || !token ? (
        <p class="empty">No tokens yet.</p>
      ) : (
        <>
          <p class="chosen-token">
            <code class={`mark-as ${look(token.sources[0])}`}>{visible(token.text)}</code> id {token.id},{" "}
            {proposedBy(token.sources)}
          </p>
          {step.tree ? <Tree step={step} tree={step.tree} chosen={token.node} /> : <p class="empty">The server sent no tree.</p>}
        </>
      )}
    </section>
  );
}

function StepSummary({ step, tree }: { step: Step; tree: StepTree }) {
  const drafted = tree.nodes.length - 1;
  return (
    <p class="summary">
      <b>{count(step.tokens.length, "token")}</b> · {tree.accepted.length} of {drafted} drafted accepted
      {drafted > 0 && ` (${percent(tree.accepted.length, drafted)})`} · draft {ms(tree.draft_ms)} · verify {ms(tree.verify_ms)}
    </p>
  );
}

function Tree({ step, tree, chosen }: { step: Step; tree: StepTree; chosen: number | null }) {
  const own = step.tokens.find((token) => token.node === null);
  return (
    <>
      {tree.nodes.length === 1 && <p class="hint">Nothing was drafted: the target produced one token.</p>}
      <TreeView tree={tree} ownText={own?.text ?? null} chosen={chosen} />
      <details>
        <summary>The tree as a table</summary>
        <div class="scroll" tabIndex={0} role="region" aria-label="The tree as a table">
          <table>
            <thead>
              <tr>
                <th scope="col">Node</th>
                <th scope="col">After</th>
                <th scope="col">Token</th>
                <th scope="col">Id</th>
                <th scope="col">Chance</th>
                <th scope="col">Drafters</th>
                <th scope="col">Outcome</th>
              </tr>
            </thead>
            <tbody>
              {tree.nodes.map((node, i) => (
                <tr key={i} class={tree.accepted.includes(i) ? "good" : ""}>
                  <td>{i}</td>
                  <td>{node.parent < 0 ? "–" : node.parent}</td>
                  <td>
                    <code>{visible(node.text)}</code>
                  </td>
                  <td>{node.token_id}</td>
                  <td>{i === 0 ? "–" : percent(node.chance, 1)}</td>
                  <td>{node.sources.join(", ") || "–"}</td>
                  <td>{i === 0 ? "context" : tree.accepted.includes(i) ? "✓ accepted" : "✕ rejected"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </details>
    </>
  );
}
