import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";

const phone = matchMedia("(max-width: 759px)");
export const narrow = signal(phone.matches);
phone.addEventListener("change", () => (narrow.value = phone.matches));

interface Props {
  name: string;
  title: string;
  aside?: ComponentChildren;
  /** On a phone the panel shows its title only, until it is opened. */
  folds?: boolean;
  children: ComponentChildren;
}

export function Panel({ name, title, aside, folds, children }: Props) {
  const heading = <h2 id={`${name}-title`}>{title}</h2>;
  return (
    <section class={`panel ${name}`} id={name} aria-labelledby={`${name}-title`}>
      {folds && narrow.value ? (
        <details>
          <summary>{heading}</summary>
          {aside}
          {children}
        </details>
      ) : (
        <>
          <div class="title">
            {heading}
            {aside}
          </div>
          {children}
        </>
      )}
    </section>
  );
}

/** Copies `text()`. Browsers offer the clipboard over TLS and on this machine only. */
export function Copy({ label, text }: { label: string; text: () => string }) {
  const [done, finish] = useState(false);
  if (!navigator.clipboard) return null;
  const copy = async () => {
    await navigator.clipboard.writeText(text());
    finish(true);
    setTimeout(() => finish(false), 1500);
  };
  return (
    <button type="button" class="quiet" onClick={() => void copy()}>
      {done ? "Copied" : label}
    </button>
  );
}
