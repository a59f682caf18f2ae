// Starts `dslpar lsp` for Python and YAML files. Findings, fixes and completion are the server's: docs/editors.md.
import { execFile } from "node:child_process";
import { promisify } from "node:util";
import * as vscode from "vscode";
import { LanguageClient } from "vscode-languageclient/node";

const LANGUAGES = ["python", "yaml"];
let client: LanguageClient | undefined;

/** Return the server's command: the setting, else the Python extension's interpreter, else PATH. */
async function command(): Promise<string[]> {
  const written = vscode.workspace.getConfiguration("dslpar").get<string[]>("command", []);
  if (written.length) return written;
  const python = vscode.extensions.getExtension("ms-python.python");
  if (python) {
    const api = python.isActive ? python.exports : await python.activate();
    const chosen = api?.environments?.getActiveEnvironmentPath(vscode.workspace.workspaceFolders?.[0]?.uri);
    const interpreter = chosen && (await api.environments.resolveEnvironment(chosen))?.executable?.uri?.fsPath;
    if (interpreter) return [interpreter, "-m", "dslpar", "lsp"];
  }
  return ["dslpar", "lsp"];
}

async function start(): Promise<void> {
  const [program, ...args] = await command();
  const cwd = vscode.workspace.workspaceFolders?.[0]?.uri.fsPath;
  try {
    // The client restarts a server that ends. So first one whose input ends at once: it fails without dslpar or its extra.
    const trial = promisify(execFile)(program, args, { cwd });
    trial.child.stdin?.end();
    await trial;
    client = new LanguageClient("dslpar", "dslpar", { command: program, args, options: { cwd } }, {
      documentSelector: LANGUAGES.map((language) => ({ scheme: "file", language })),
    });
    await client.start();
  } catch (error) {
    const text = `dslpar's server does not start with '${[program, ...args].join(" ")}'. `;
    const install = "Install it with pip install 'dslpar[lsp]', or change the setting dslpar.command.";
    const chosen = await vscode.window.showErrorMessage(`${text}${install} (${error})`, "Open Setting");
    if (chosen) await vscode.commands.executeCommand("workbench.action.openSettings", "dslpar.command");
  }
}

async function stop(): Promise<void> {
  const running = client;
  client = undefined;
  if (running?.isRunning()) await running.stop();
}

/** Write the number of ranks into the comment from which the server reads it, and keep the comment's other settings. */
async function setWorldSize(): Promise<void> {
  const editor = vscode.window.activeTextEditor;
  if (!editor || !LANGUAGES.includes(editor.document.languageId)) return;
  const size = await vscode.window.showInputBox({
    prompt: "Number of ranks; several with commas",
    validateInput: (text) => (/^[1-9]\d*(,[1-9]\d*)*$/.test(text) ? undefined : "such as 8 or 8,64"),
  });
  if (!size) return;
  const lines = editor.document.getText().split(/\r?\n/);
  const end = lines.findIndex((line) => line.trim() && !line.startsWith("#"));
  const at = lines.slice(0, end < 0 ? lines.length : end).findIndex((line) => /^#\s*dslpar:(\s+[\w-]+=\S+)+\s*$/.test(line));
  await editor.edit((edit) => {
    if (at < 0) return edit.insert(new vscode.Position(0, 0), `# dslpar: world-size=${size}\n`);
    const others = lines[at].replace(/^#\s*dslpar:/, "").replace(/\sworld-size=\S+/g, "").trim();
    edit.replace(editor.document.lineAt(at).range, `# dslpar: world-size=${size} ${others}`.trim());
  });
}

export async function activate(context: vscode.ExtensionContext): Promise<void> {
  const restart = async () => {
    await stop();
    await start();
  };
  context.subscriptions.push(
    vscode.commands.registerCommand("dslpar.restart", restart),
    vscode.commands.registerCommand("dslpar.setWorldSize", setWorldSize),
    vscode.workspace.onDidChangeConfiguration((event) => {
      if (event.affectsConfiguration("dslpar.command")) void restart();
    }),
  );
  await start();
}

export const deactivate = stop;
