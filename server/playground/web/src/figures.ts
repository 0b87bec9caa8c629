// Formats of numbers and tokens.

/** Milliseconds with three significant digits. */
export function ms(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return `${value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2)} ms`;
}

export function percent(part: number, whole: number): string {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–";
}

export function count(number: number, what: string): string {
  return `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
}

/** `value` rounded up to 1, 2 or 5 times a power of ten. */
export function niceCeiling(value: number): number {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const found = [1, 2, 5, 10].find((factor) => factor * power >= value * (1 - 1e-9));
  return (found ?? 10) * power;
}

/** A token's text with white space made visible. */
export function visible(text: string): string {
  if (text === "") return "∅";
  return text.replace(/ /g, "·").replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍");
}

// Each drafter has a colour and a kind of line, so that colour is not the only difference.
const LOOKS = ["suffix", "model", "prediction", "head", "grammar"];

/** The CSS class of a drafter's name; `target` for the target's own tokens. */
export function look(source: string | undefined): string {
  if (source === undefined || source === "target") return "d-target";
  const name = source.split(":")[0] ?? source;
  return LOOKS.includes(name) ? `d-${name}` : "d-other";
}

/** The drafters that proposed a token, in words. */
export function proposedBy(sources: readonly string[]): string {
  return sources.length ? `proposed by ${sources.join(" and ")}` : "the target's own";
}
