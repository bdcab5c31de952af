"""How the report looks: one style sheet, light and dark, for screens of any width and for print."""

from __future__ import annotations

from millrace.observability.charts import CHART_STYLE, DARK, LIGHT

PAGE_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);line-height:1.5;
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;font-variant-numeric:tabular-nums;
-webkit-text-size-adjust:100%}
main{max-width:1120px;margin:0 auto;padding:40px 24px 56px}
h1{font-size:15px;font-weight:600;margin:0;color:var(--muted);overflow-wrap:anywhere;display:flex;gap:10px;
align-items:center;flex-wrap:wrap}
h2{font-size:21px;font-weight:650;letter-spacing:-.01em;margin:52px 0 4px}
h3{font-size:15px;font-weight:650;margin:0}
p{margin:0}
.status{font-size:13px;font-weight:600;border:1.5px solid var(--line);border-radius:99px;padding:1px 10px;
color:var(--ink);background:var(--card)}
.status::before{content:"";display:inline-block;width:8px;height:8px;border-radius:50%;margin-right:7px;
background:var(--c3)}
.status.open::before{background:var(--c2)}
.result{font-size:clamp(22px,3.6vw,34px);line-height:1.25;font-weight:650;letter-spacing:-.018em;
margin:14px 0 28px;max-width:26em;text-wrap:balance}
header .note{margin:-18px 0 28px}
.result b{color:var(--c1);font-weight:inherit}
.note{color:var(--muted);font-size:15px;margin:4px 0 0;max-width:46em}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:1px;background:var(--line);
border:1px solid var(--line);border-radius:12px;overflow:hidden;margin:0}
.facts div{background:var(--card);padding:12px 16px}
.facts dt{color:var(--muted);font-size:13px}
.facts dd{margin:0;font-size:18px;font-weight:600;overflow-wrap:anywhere}
.charts{display:grid;gap:16px;grid-template-columns:repeat(3,minmax(0,1fr));margin-top:16px}
.charts.wide{grid-template-columns:repeat(2,minmax(0,1fr))}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:12px;padding:14px 14px 8px;
break-inside:avoid}
figcaption{padding:0 4px 6px}
figcaption p{color:var(--muted);font-size:13px;line-height:1.4}
.chart{display:block;width:100%;height:auto}
.bar{height:26px;border-radius:6px;margin:2px 0 14px}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 22px;padding:0;margin:0;font-size:14px}
.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px}
.legend span{color:var(--muted)}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:16px 18px;
margin-top:16px;break-inside:avoid}
.moves{border-collapse:collapse;font-size:15px;margin:4px 0 2px}
.moves th,.moves td{text-align:right;padding:5px 0 5px 26px;font-weight:400}
.moves th{color:var(--muted);font-size:14px}
.moves th:first-child{text-align:left;padding-left:0}
.moves tbody tr{border-top:1px solid var(--line)}
.moves b{font-weight:650}
.card+.note{margin-top:20px}
.pair{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,1fr);gap:14px;margin-top:12px}
.said{border-left:3px solid var(--c7);padding:2px 0 2px 12px}
.said.right{border-color:var(--c3)}
.said.wrong{border-color:var(--c5)}
.said p{font-size:13px;color:var(--muted)}
.said p b{font-weight:650}
.said.right b{color:var(--c3)}
.said.wrong b{color:var(--c5)}
pre{margin:4px 0 0;font:14px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;
overflow-wrap:anywhere;max-height:20em;overflow:auto;unicode-bidi:isolate}
.question{font-weight:500}
.answer{font-size:14px;color:var(--muted);margin-top:6px;overflow-wrap:anywhere}
.answer b{color:var(--ink);font-weight:600}
.warnings{padding-left:20px;margin:0}
.warnings li{margin:4px 0;overflow-wrap:anywhere}
.warnings li::marker{content:"!  ";color:var(--c2);font-weight:700}
details{margin-top:16px;background:var(--card);border:1px solid var(--line);border-radius:12px;
padding:14px 18px}
summary{cursor:pointer;font-weight:600}
details pre{max-height:none;margin-top:12px}
footer{margin-top:36px;color:var(--muted);font-size:13px;overflow-wrap:anywhere}
@media(max-width:900px){.charts{grid-template-columns:repeat(2,minmax(0,1fr))}}
@media(max-width:640px){main{padding:24px 14px 40px}.charts,.charts.wide{grid-template-columns:minmax(0,1fr)}
.facts{grid-template-columns:repeat(2,minmax(0,1fr))}.facts div:last-child:nth-child(odd){grid-column:span 2}
.pair{grid-template-columns:minmax(0,1fr)}figure{padding:12px 8px 6px}h2{margin-top:40px}}
@media print{main{max-width:none;padding:0}body{font-size:12px}pre{max-height:none;overflow:visible}
h2{break-after:avoid}.charts{grid-template-columns:repeat(2,minmax(0,1fr))}}
"""


def style_sheet() -> str:
    """The whole style sheet; paper is always light."""
    return (
        f":root{{color-scheme:light dark;{LIGHT}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{DARK}}}}}{CHART_STYLE}{PAGE_STYLE}"
    )
