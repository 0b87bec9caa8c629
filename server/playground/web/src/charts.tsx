// Small SVG charts. Each has a label in words.
import type { ComponentChildren } from "preact";
import { niceCeiling } from "./figures";

const W = 300;
const H = 64;

interface Frame {
  label: string;
  top: number;
  format: (value: number) => string;
}

export interface Bar {
  /** Stacked from the base, each with its CSS class. */
  parts: { value: number; look: string }[];
  title: string;
  chosen?: boolean;
  onPick?: () => void;
}

/** A bar chart of the last `slots` bars. */
export function Bars({ bars, slots, ...frame }: { bars: Bar[]; slots: number } & Omit<Frame, "top">) {
  const seen = bars.slice(-Math.max(slots, 1));
  const sums = seen.map((bar) => bar.parts.reduce((sum, part) => sum + part.value, 0));
  const top = niceCeiling(Math.max(...sums, 0));
  const width = W / Math.max(seen.length, Math.min(slots, 24));
  const gap = Math.min(2, width * 0.25);
  return (
    <Plot {...frame} top={top}>
      {seen.map((bar, i) => {
        let base = H;
        return (
          <g key={i} class={`bar${bar.chosen ? " chosen" : ""}${bar.onPick ? " pick" : ""}`} onClick={bar.onPick}>
            <title>{bar.title}</title>
            <rect class="back" x={i * width} y={0} width={width} height={H} />
            {bar.parts.map((part) => {
              const height = (part.value / top) * H;
              base -= height;
              return <rect key={part.look} class={part.look} x={i * width} y={base} width={width - gap} height={height} />;
            })}
          </g>
        );
      })}
    </Plot>
  );
}

/** Lines over a common, evenly spaced axis. */
export function Lines({ lines, ...frame }: { lines: { values: number[]; look: string }[] } & Omit<Frame, "top">) {
  const top = niceCeiling(Math.max(...lines.flatMap((line) => line.values)));
  const longest = Math.max(2, ...lines.map((line) => line.values.length));
  return (
    <Plot {...frame} top={top}>
      {lines.map(({ values, look }, i) => (
        <polyline
          key={i}
          class={`curve ${look}`}
          points={values.map((v, x) => `${(x / (longest - 1)) * W},${H - (v / top) * H}`).join(" ")}
        />
      ))}
    </Plot>
  );
}

function Plot({ label, top, format, children }: Frame & { children: ComponentChildren }) {
  return (
    <div class="plot">
      <div class="axis" aria-hidden="true">
        <span>{format(top)}</span>
        <span>0</span>
      </div>
      <svg viewBox={`0 0 ${W} ${H}`} preserveAspectRatio="none" role="img" aria-label={label}>
        <line class="grid" x1="0" x2={W} y1="0.5" y2="0.5" />
        <line class="grid" x1="0" x2={W} y1={H / 2} y2={H / 2} />
        {children}
        <line class="base" x1="0" x2={W} y1={H - 0.5} y2={H - 0.5} />
      </svg>
    </div>
  );
}
