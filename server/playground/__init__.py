"""The playground at /: a web page that shows which drafter proposed each token. `web` has its sources, `static` the
build."""
