;; Drive eglot in batch mode, which has no idle loop: the server answers while the driver waits.
(setq eglot-sync-connect 30 eglot-autoshutdown t)

(defun wait-for (what met)
  "Wait until MET returns something."
  (let ((end (+ (float-time) 120)))
    (while (not (funcall met))
      (when (> (float-time) end) (error "no %s" what))
      (accept-process-output nil 0.05))))

(find-file "cfg.py")
(apply #'eglot--connect (eglot--guess-contact))
(flymake-start)
(wait-for "findings" #'flymake-diagnostics)
(dolist (each (flymake-diagnostics))
  (princ (format "%d %s\n" (line-number-at-pos (flymake-diagnostic-beg each)) (flymake-diagnostic-text each))))
(search-forward "hiden_s")
(let ((actions (eglot-code-actions (point) nil nil nil)))
  (princ (format "%S\n" (mapcar (lambda (each) (plist-get each :title)) (append actions nil))))
  (eglot--apply-workspace-edit (plist-get (elt actions 0) :edit)))
(eglot--signal-textDocument/didChange)
(wait-for "file without findings" (lambda () (flymake-start) (null (flymake-diagnostics))))
(save-buffer)
