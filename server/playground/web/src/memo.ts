// Components that are drawn again only when what they are given changes.
import { type ComponentChild, Component, type FunctionComponent } from "preact";

export function memo<P extends object>(render: (props: P) => ComponentChild): FunctionComponent<P> {
  class Memo extends Component<P> {
    override shouldComponentUpdate(next: P): boolean {
      const [a, b] = [this.props as Record<string, unknown>, next as Record<string, unknown>];
      return Object.keys(b).some((key) => a[key] !== b[key]);
    }
    override render(props: P): ComponentChild {
      return render(props);
    }
  }
  return Memo as unknown as FunctionComponent<P>;
}
