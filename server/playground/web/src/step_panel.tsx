import { count, look, ms, percent, proposedBy, visible } from "./figures";
import { Panel } from "./panel";
import { branches, type Step, type Token } from "./run";
import sample from "./sample.json";
import { live, looked, selected, shown } from "./store";
import { TreeView } from "./tree_view";
import type { StepTree } from "./wire";

/** The step of the selected token; a recorded one before there are tokens. */
export function StepPanel() {
  const run = live(shown.value);
  const token = run?.tokens[looked.value ?? -1];
  const step = token && run?.steps[token.step];
  if (!run || !step) return <Recorded />;
  const picked = selected.value !== null;
  const best = !picked && step.tree !== null && branches(step.tree) > 0;
  return (
    <Panel
      name="step-panel"
      title={`${best ? "The most branched step: " : ""}Step ${step.index + 1} of ${run.steps.length}`}
      aside={step.tree && <StepSummary step={step} tree={step.tree} />}
    >
      <Filled step={step} token={token} follow={picked} />
    </Panel>
  );
}

function Recorded() {
  return (
    <Panel name="step-panel" title="A recorded step">
      <p class="hint sample">
        {sample.model} answers “{sample.asked}” and has just said <code>{visible(sample.tree.nodes[0]!.text)}</code>. Its draft,{" "}
        {sample.draft}, proposes a tree of {sample.tree.nodes.length - 1} nodes. The model verifies all of them in one forward:{" "}
        {sample.tree.accepted.length} are accepted, and it adds one token of its own. <b>Generate</b> shows the steps of your own server.
      </p>
      <TreeView tree={sample.tree} ownText={sample.own_text} chosen={null} follow={false} />
    </Panel>
  );
}

function Filled({ step, token, follow }: { step: Step; token: Token; follow: boolean }) {
  return (
    <>
      <p class="chosen-token">
        <code class={`mark-as ${look(token.sources[0])}`}>{visible(token.text)}</code> id {token.id}, {proposedBy(token.sources)}
      </p>
      {step.tree ? (
        <Tree step={step} tree={step.tree} chosen={token.node} follow={follow} />
      ) : (
        <p class="empty">The server sent no tree.</p>
      )}
    </>
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

function Tree({ step, tree, chosen, follow }: { step: Step; tree: StepTree; chosen: number | null; follow: boolean }) {
  const own = step.tokens.find((token) => token.node === null);
  return (
    <>
      {tree.nodes.length === 1 && <p class="hint">Nothing was drafted: the target produced one token.</p>}
      <TreeView tree={tree} ownText={own?.text ?? null} chosen={chosen} follow={follow} />
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
                <tr key={i}>
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
