import { useEffect, useRef } from "preact/hooks";
import { count, look, percent, visible } from "./figures";
import { layoutTree, type Place } from "./tree_layout";
import type { StepTree } from "./wire";

const COLUMN = 110;
const ROW = 46;
const WIDTH = 92;
const HEIGHT = 24;
const PAD = 6;
const SIGN = { root: "", accepted: "✓", rejected: "✕", own: "+" };
const LETTERS = 9;

interface Props {
  tree: StepTree;
  ownText: string | null;
  chosen: number | null;
  /** Scroll to the chosen node; else the root is in sight. */
  follow: boolean;
}

/** The tree of a step: the accepted path along the top, rejected branches below, the target's own token at the path's end. */
export function TreeView({ tree, ownText, chosen, follow }: Props) {
  const places = layoutTree(tree, ownText !== null);
  const width = Math.max(...places.map(left)) + WIDTH + PAD;
  const height = Math.max(...places.map(top)) + HEIGHT + 16 + PAD;
  const where = new Map(places.map((place) => [place.node, place]));
  const box = useRef<HTMLDivElement>(null);
  const at = where.get(chosen);
  useEffect(() => {
    const { current } = box;
    if (current && !follow) current.scrollTo(0, 0);
    if (!current || !at || !follow) return;
    const [x, y] = [left(at), top(at)];
    if (x < current.scrollLeft || x + COLUMN > current.scrollLeft + current.clientWidth) current.scrollLeft = x - COLUMN;
    if (y < current.scrollTop || y + ROW > current.scrollTop + current.clientHeight) current.scrollTop = y - ROW;
  }, [tree, chosen, follow]);
  const rejected = tree.nodes.length - 1 - tree.accepted.length;
  const label = `Tree: ${count(tree.accepted.length, "drafted token")} accepted, ${rejected} rejected. The table below lists all nodes.`;
  return (
    <div ref={box} class="scroll tree" tabIndex={0} role="region" aria-label="Tree of the step">
      <svg width={width} height={height} viewBox={`0 0 ${width} ${height}`} role="img" aria-label={label}>
        {places.map((place) => {
          const parent = place.parent === null ? undefined : where.get(place.parent);
          return parent && <path key={`e${place.node}`} class={`edge ${place.outcome}`} d={edge(parent, place)} />;
        })}
        {places.map((place) => (
          <Node key={`n${place.node}`} place={place} tree={tree} ownText={ownText ?? ""} chosen={chosen} />
        ))}
      </svg>
    </div>
  );
}

function Node(props: { place: Place; tree: StepTree; ownText: string; chosen: number | null }) {
  const { place, tree, ownText, chosen } = props;
  const node = place.node === null ? null : tree.nodes[place.node]!;
  const source = place.outcome === "root" ? undefined : node?.sources[0];
  const text = visible(node ? node.text : ownText);
  const cut = text.length > LETTERS ? `${text.slice(0, LETTERS - 1)}…` : text;
  const [x, y] = [left(place), top(place)];
  const below = node ? (place.outcome === "root" ? "context" : `${percent(node.chance, 1)} ${names(node.sources)}`) : "target";
  const marked = place.outcome !== "root" && place.node === chosen ? " chosen" : "";
  return (
    <g class={`node ${place.outcome} ${look(source)}${marked}`}>
      <title>{`${text}: ${below}, ${place.outcome}`}</title>
      <rect x={x} y={y} width={WIDTH} height={HEIGHT} rx="4" />
      <text x={x + 8} y={y + 16} class="text">
        {cut}
      </text>
      <text x={x + WIDTH - 8} y={y + 16} class="sign" text-anchor="end">
        {SIGN[place.outcome]}
      </text>
      {node && place.outcome !== "root" && <line class="line" x1={x + 8} x2={x + WIDTH - 22} y1={y + 20.5} y2={y + 20.5} />}
      <text x={x + 2} y={y + HEIGHT + 12} class="below">
        {below}
      </text>
    </g>
  );
}

function names(sources: readonly string[]): string {
  return sources.length > 1 ? `${sources[0]} +${sources.length - 1}` : (sources[0] ?? "");
}

function left(place: Place): number {
  return PAD + place.x * COLUMN;
}

function top(place: Place): number {
  return PAD + place.y * ROW;
}

function edge(from: Place, to: Place): string {
  const [x1, y1] = [left(from) + WIDTH, top(from) + HEIGHT / 2];
  const [x2, y2] = [left(to), top(to) + HEIGHT / 2];
  if (y1 === y2) return `M${x1} ${y1}H${x2}`;
  const middle = x1 + (x2 - x1) / 2;
  return `M${x1} ${y1}H${middle - 4}Q${middle} ${y1} ${middle} ${y1 + 4}V${y2 - 4}Q${middle} ${y2} ${middle + 4} ${y2}H${x2}`;
}
