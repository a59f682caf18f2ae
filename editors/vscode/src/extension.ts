// Starts `dslpar lsp` for Python and YAML files. Findings, fixes and completion are the server's: docs/editors.md.
import { execFile } from "node:child_process";
import { promisify } from "node:util";
import type { PythonExtension } from "@vscode/python-extension";
import * as vscode from "vscode";
import { LanguageClient } from "vscode-languageclient/node";

const LANGUAGES = ["python", "yaml"];
let client: LanguageClient | undefined;
/** Starts and stops happen one after the other: two restarts at once would leave a server behind. */
let queue: Promise<unknown> = Promise.resolve();

/** Return the commands to try: the setting alone, else the Python extension's interpreter, then PATH. */
async function commands(): Promise<string[][]> {
  const written = vscode.workspace.getConfiguration("dslpar").get<string[]>("command", []);
  if (written.length) return [written];
  const environments = await pythonEnvironments();
  const chosen = environments?.getActiveEnvironmentPath(vscode.workspace.workspaceFolders?.[0]?.uri);
  const interpreter = chosen && (await environments?.resolveEnvironment(chosen))?.executable.uri?.fsPath;
  return [...(interpreter ? [[interpreter, "-m", "dslpar", "lsp"]] : []), ["dslpar", "lsp"]];
}

async function pythonEnvironments(): Promise<PythonExtension["environments"] | undefined> {
  const python = vscode.extensions.getExtension<PythonExtension>("ms-python.python");
  return (await python?.activate())?.environments;
}

async function start(): Promise<void> {
  const failures: string[] = [];
  const candidates = await commands();
  for (const [program, ...args] of candidates) {
    // Without PYTHONSAFEPATH, `python -m` would import the workspace's own yaml.py or types.py.
    const env = { ...process.env, PYTHONSAFEPATH: "1" };
    const options = { cwd: vscode.workspace.workspaceFolders?.[0]?.uri.fsPath, env };
    try {
      // The client restarts a server that ends. So first one whose input ends at once: it fails without dslpar or its extra.
      const trial = promisify(execFile)(program, args, { ...options, timeout: 60_000 });
      trial.child.stdin?.on("error", () => undefined).end(); // a program that is gone already: the trial says why
      await trial;
    } catch (error) {
      const { stderr, message } = error as { stderr?: string; message: string };
      failures.push(`${[program, ...args].join(" ")}: ${stderr?.trim().split("\n").at(-1) || message}`);
      continue;
    }
    client = new LanguageClient("dslpar", "dslpar", { command: program, args, options }, {
      documentSelector: LANGUAGES.map((language) => ({ scheme: "file", language })),
      middleware: {
        // After a key come its values, as if the author had typed the `=`.
        async provideCompletionItem(document, position, context, token, next) {
          const made = await next(document, position, context, token);
          const again = { title: "", command: "editor.action.triggerSuggest", arguments: [{ auto: true }] };
          const followed = [vscode.CompletionItemKind.Property, vscode.CompletionItemKind.Module];
          for (const item of Array.isArray(made) ? made : (made?.items ?? []))
            if (item.kind !== undefined && followed.includes(item.kind)) item.command = again;
          return made;
        },
      },
    });
    return client.start();
  }
  void reportFailure(candidates[0], failures);
}

async function reportFailure([program, module]: string[], failures: string[]): Promise<void> {
  const line = `${module === "-m" ? `${program} -m ` : ""}pip install 'dslpar[lsp]'`;
  const text = `Cannot start the dslpar server. Install it: ${line} (${failures.join("; ")})`;
  const chosen = await vscode.window.showErrorMessage(text, "Copy Command", "Open Setting");
  if (chosen === "Copy Command") await vscode.env.clipboard.writeText(line);
  if (chosen === "Open Setting") await vscode.commands.executeCommand("workbench.action.openSettings", "dslpar.command");
}

async function stop(): Promise<void> {
  const running = client;
  client = undefined;
  if (running?.isRunning()) await running.stop();
}

function restart(): Promise<unknown> {
  queue = queue.then(stop).then(start).catch((error) => void vscode.window.showErrorMessage(`dslpar: ${error}`));
  return queue;
}

/** Ask for the number of ranks; the server's command writes it into the comment from which it reads it. */
async function setWorldSize(): Promise<void> {
  const document = vscode.window.activeTextEditor?.document;
  if (!document || !LANGUAGES.includes(document.languageId))
    return void vscode.window.showInformationMessage("Open a Python or YAML config first.");
  if (!client?.isRunning()) return void vscode.window.showInformationMessage("The dslpar server is not running.");
  const size = await vscode.window.showInputBox({
    prompt: "Number of ranks; several with commas",
    validateInput: (text) => (/^[1-9]\d*(,[1-9]\d*)*$/.test(text) ? undefined : "such as 8 or 8,64"),
  });
  if (size) await vscode.commands.executeCommand("dslpar.setWorld", document.uri.toString(), size);
}

export async function activate(context: vscode.ExtensionContext): Promise<void> {
  context.subscriptions.push(
    vscode.commands.registerCommand("dslpar.restart", restart),
    vscode.commands.registerCommand("dslpar.setWorldSize", setWorldSize),
    vscode.workspace.onDidChangeConfiguration((event) => {
      if (event.affectsConfiguration("dslpar.command")) void restart();
    }),
  );
  const changed = (await pythonEnvironments())?.onDidChangeActiveEnvironmentPath(restart);
  if (changed) context.subscriptions.push(changed);
  await restart();
}

export const deactivate = () => queue.then(stop);
