"""Write docs/settings.md from the dataclasses' fields: every dotted option with its sentence, unit and default."""

from pathlib import Path

from quatrain.recipes.resolve import settings_page

if __name__ == "__main__":
    Path("docs/settings.md").write_text(settings_page(), encoding="utf-8")
